"""Owns linking kernels with device code into a library that TVM exports: the table of its modules with theirs added.

Knows nothing of TVM's compiler or of models. What the table is and what a kernel's object holds: `cudalink`.

TVM writes the table as one constant into an object of its own. Here it is read, the kernels' modules become further
imports of the library's own module, where their host code looks for them, and the constant is written again.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from kerneldecl.errors import ToolchainError
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.companions import companions
from kerneldecl.toolchain.cuda_objects import ELF_FILE, ELF_SECTION, LIBRARY, SECTION, sized
from kerneldecl.toolchain.cxx import compiler, run

TABLE = "__tvm_ffi__library_bin"
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMBOL_TABLE = 2
_WORD = struct.Struct("<Q")

_ASSEMBLY = """\
.section .rodata
.balign 16
.globl {table}
{table}:
.incbin "table.bin"
.section .note.GNU-stack,"",@progbits
"""
# What kernels' objects carry is in the table already.
_SCRIPT = "SECTIONS {{ /DISCARD/ : {{ *({section}) }} }} INSERT BEFORE .text;\n"


def link_model(library: str, files: Sequence[str], kernels: Sequence[Path], options: Sequence[str] = ()) -> None:
    """Link what TVM has made of a model with the objects of kernels into `library`.

    `files` are objects, and, of a model that computes nothing itself, sources that are compiled with `options`. Raise
    ToolchainError with the compiler's or the linker's last words, or where no object has TVM's table.
    """
    with scratch_folder() as path:
        objects = [Path(name) if name.endswith(".o") else _compiled(Path(name), path, options) for name in files]
        tables = {each: found for each in objects if (found := _constant(each.read_bytes(), TABLE))}
        if len(tables) != 1:
            raise ToolchainError(f"{len(tables)} objects of the model have {TABLE}; kernels can be linked into what TVM 0.27 exports")
        ((holder, table),) = tables.items()
        modules = [part for kernel in kernels if (part := _section(kernel.read_bytes(), SECTION))]
        (path / "table.bin").write_bytes(with_modules(table, modules))
        (path / "table.s").write_text(_ASSEMBLY.format(table=TABLE), encoding="ascii")
        (path / "discard.ld").write_text(_SCRIPT.format(section=SECTION), encoding="ascii")
        rest = [*(each for each in objects if each != holder), *kernels]
        (path / "objects.rsp").write_text("".join(f'"{each.resolve()}"\n' for each in rest), encoding="utf-8")
        flags = ["-Wl,--build-id=none", "-Wl,-T,discard.ld"]
        output = ["-o", str(Path(library).resolve())]
        command = [compiler(), "-shared", *output, "table.s", "@objects.rsp", *companions(rest, "cuda"), *flags]
        run(command, path, f"linking {Path(library).name}")


def _compiled(source: Path, folder: Path, options: Sequence[str]) -> Path:
    made = folder / f"{source.name}.o"
    run([compiler(), "-c", "-fPIC", "-o", str(made), *options, str(source.resolve())], folder, f"compiling {source.name}")
    return made


def with_modules(table: bytes, modules: Sequence[bytes]) -> bytes:
    """Return a table with more modules, kind and content of each, which the library's own module imports.

    Raise ValueError for a table that has no library in it, or is not whole.
    """
    begins, imports, rest = _read(table)
    library, count = _place_of_library(rest), len(begins) - 1
    children = [imports[begin:end] for begin, end in itertools.pairwise(begins)]
    children[library] = [*children[library], *range(count, count + len(modules))]
    children += [[] for _ in modules]
    flat = [child for each in children for child in each]
    starts = [sum(map(len, children[:at])) for at in range(len(children) + 1)]
    body = b"".join([*(_WORD.pack(number) for number in (len(starts), *starts, len(flat), *flat)), rest, *modules])
    return sized(body)


def _read(table: bytes) -> tuple[list[int], list[int], bytes]:
    """Return where each module's imports begin, the imports, and what follows: kinds and contents."""
    words = (number for (number,) in _WORD.iter_unpack(table[: len(table) // 8 * 8]))
    size = next(words)
    begins = [next(words) for _ in range(next(words))]
    imports = [next(words) for _ in range(next(words))]
    return begins, imports, table[8 * (3 + len(begins) + len(imports)) : 8 + size]


def _place_of_library(modules: bytes) -> int:
    """Return the position of the library itself among modules, each with its kind, and but for the library with its content."""
    at, position = 0, 0
    while at < len(modules):
        (size,) = _WORD.unpack_from(modules, at)
        kind = modules[at + 8 : at + 8 + size]
        at += 8 + size
        if kind == LIBRARY:
            return position
        at += 8 + _WORD.unpack_from(modules, at)[0]
        position += 1
    raise ValueError(f"the model's {TABLE} has no library in it")


def _sections(content: bytes) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Yield name, header and content of each section of a relocatable object."""
    header = ELF_FILE.unpack_from(content)
    table, count, names = header[6], header[12], header[13]
    entries = [ELF_SECTION.unpack_from(content, table + at * ELF_SECTION.size) for at in range(count)]
    texts = content[entries[names][4] :]
    for entry in entries:
        yield texts[entry[0] : texts.index(b"\0", entry[0])].decode(), entry, content[entry[4] : entry[4] + entry[5]]


def _section(content: bytes, name: str) -> bytes:
    """Return the content of a section; nothing where there is none of the name."""
    return next((body for found, _, body in _sections(content) if found == name), b"")


def _constant(content: bytes, name: str) -> bytes:
    """Return the content of a global constant; nothing where the object defines none of the name."""
    sections = list(_sections(content))
    for _, entry, body in sections:
        if entry[1] != _SYMBOL_TABLE:
            continue
        texts = sections[entry[6]][2]
        for text, _, _, section, value, size in _SYMBOL.iter_unpack(body):
            if section and texts[text : texts.index(b"\0", text)] == name.encode():
                found: bytes = sections[section][2][value : value + size]
                return found
    return b""
