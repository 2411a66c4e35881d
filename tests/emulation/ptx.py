"""Owns how CUDA source becomes C++: each asm statement is read as PTX, whose instructions become calls of models.

Knows nothing of which instructions there are.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from emulation.instructions import STRING, Instruction, UnknownInstructionError, model, split

_ASM = re.compile(r"\b(?:asm|__asm__)\s*(?:volatile|__volatile__)?\s*\(")
_STATIC = (
    r"struct alignas(128) \2_type { \1 data[\3]; }; static std::map<unsigned, \2_type> \2_of; "
    r"\1* \2 = \2_of[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)].data;"
)
_HELPER = re.compile(r"^[^\n#]*\b(\w+)\([^;{}]*\)\s*\{", re.MULTILINE)


def translate(source: str) -> str:
    """Return the CUDA source with C++ in place of its asm statements and of how it declares shared memory."""
    source = re.sub(r"^\s*#include\s*<[^>]*>", "", source, flags=re.MULTILINE)
    source = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)machine::dynamic_shared();", source)
    # Blocks run side by side: each has a static array of its own.
    source = re.sub(r"\b__shared__ (?:__align__\(\d+\) |alignas\(\d+\) )?((?:(?:un)?signed )?\w+) (\w+)\[(\d+)\];", _STATIC, source)
    parts, end = [], 0
    for number, match in enumerate(_ASM.finditer(source)):
        close = _closing(source, match.end() - 1)
        parts += [source[end : match.start()], _statement(source, match.start(), source[match.end() : close], number)]
        end = close + 1
    return "".join([*parts, source[end:]])


def _closing(text: str, opening: int) -> int:
    """Return where the parenthesis closes that opens there; strings may hold others."""
    depth, at = 0, opening
    while True:
        if text[at] == '"':
            at = STRING.match(text, at).end()  # type: ignore[union-attr]
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1


def _statement(source: str, start: int, content: str, number: int) -> str:
    template, *lists = split(content, ":")
    text = "".join(ast.literal_eval(piece) for piece in STRING.findall(template))
    values = [_expression(operand) for part in lists[:2] for operand in split(part, ",") if operand]
    try:
        return "{ " + " ".join(_lines(text, values, number)) + " }"
    except UnknownInstructionError as error:
        before = _HELPER.findall(source[:start])
        raise UnknownInstructionError(f"{before[-1] if before else 'a function'}: the emulator has no model of {error}") from None


def _expression(operand: str) -> str:
    """Return the C++ expression of an operand such as "=r"(value)."""
    return operand[operand.index("(", STRING.match(operand).end()) :]  # type: ignore[union-attr]


def _lines(text: str, values: list[str], number: int) -> Iterator[str]:
    text = re.sub(r"%(\d+)", lambda m: f"\0{m.group(1)}\0", text.replace("%%", "%"))
    text = re.sub(r"//[^\n]*", "", text).strip()
    if text.startswith("{"):
        text = text[1 : text.rindex("}")]
    labels = set(re.findall(r"(?:^|[\n;])\s*(\w+):", text))
    text = re.sub(r"(?:^|(?<=[\n;]))\s*(\w+):(?!:)", r"\1:;", text)
    for line in text.split(";"):
        line = " ".join(line.split())  # noqa: PLW2901
        if not line:
            continue
        if line.endswith(":"):
            yield f"{line[:-1]}_{number}:;"
            continue
        yield _line(line, values, labels, number)


def _line(line: str, values: list[str], labels: set[str], number: int) -> str:
    if line.startswith(".reg"):
        _, kind, names = line.split(None, 2)
        return f"{_REGISTERS[kind]} {names.replace('%', '_')};"
    guard = ""
    if line.startswith("@"):
        predicate, line = line[1:].split(None, 1)
        guard = f"if ({predicate.replace('!', '! ').replace('%', '_')}) ".replace("! ", "!")
        guard = re.sub("\0(\\d+)\0", lambda m: values[int(m.group(1))], guard)
    name, rest = re.fullmatch(r"([^\s{]+)\s*(.*)", line).groups()  # type: ignore[union-attr]
    if name.startswith("bra"):
        assert rest in labels
        return f"{guard}goto {rest}_{number};"
    operands = tuple(_operand(part, values) for part in split(rest, ",")) if rest else ()
    return f"{guard}{{ {model(Instruction(name, operands))}; }}"


_REGISTERS = {
    ".pred": "bool",
    ".b32": "uint32_t",
    ".u32": "uint32_t",
    ".s32": "int32_t",
    ".b64": "uint64_t",
    ".u64": "uint64_t",
    ".f32": "float",
    ".b16": "uint16_t",
    ".u16": "uint16_t",
}


def _operand(text: str, values: list[str]) -> str:
    text = text.strip()
    if text.startswith("["):
        text = text[1:-1]
    text = text.replace("%", "_")
    return re.sub("\0(\\d+)\0", lambda m: values[int(m.group(1))], text)
