"""Owns the canonical TensorIR of a computation: a rule's result as a module, and the text that identifies it.

Knows nothing of schedules, targets or keys other than that a digest identifies a computation.
"""

from __future__ import annotations

import itertools
import json
import keyword
import re
from collections.abc import Iterable, Sequence
from typing import Any

import tvm
from tvm import te

from kerneldecl.model import Signature
from kerneldecl.rule import Rule
from kerneldecl.store.keys import digest

_NAME = re.compile(r'(?P<string>"[^"\n]*")|(?P<number>\d[\w.]*)|(?P<dotted>\.\s*[A-Za-z_]\w*)|(?P<name>[A-Za-z_]\w*)(?P<keyword>=(?!=))?')
_DEFINITION = re.compile(r"(?P<indent>\s*)(?P<loop>for )?(?P<names>[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*)(?=(?: in |: [\w.]+ = | = ))")
_NEST = ("    for ", "    with T.sblock(")
_SPANS = frozenset({"ir.Span", "ir.SequentialSpan"})
_RESERVED = frozenset({"T", "I", *keyword.kwlist, "range"})


def lower(rule: Rule) -> tvm.IRModule:
    """Return the rule's computation as a module with one PrimFunc `main`: int64 indices, no attributes but noalias.

    Raise ValueError where the function's parameters are not those of the rule's signature, TypeError where there is no function.
    """
    lowered = rule.lower()
    if not isinstance(lowered, tvm.tirx.PrimFunc | Sequence):
        expected = "expected a list of TE tensors, inputs then outputs, or a TensorIR function"
        raise TypeError(f"{type(rule).__name__}.lower() returns {lowered!r:.80}; {expected}")
    is_script = isinstance(lowered, tvm.tirx.PrimFunc)
    func = without_spans(lowered) if is_script else te.create_prim_func(list(lowered), index_dtype_override="int64")
    mod = canonical_module(func)
    _check_signature(mod["main"], rule.signature())
    return mod


def canonical_module(func: Any) -> tvm.IRModule:
    """Return a module that holds the function as `main`, with no attribute that deployment pipelines add."""
    for name in dict(func.attrs or {}):
        func = func.without_attr(name)
    return tvm.IRModule({"main": func.with_attr({"global_symbol": "main", "tirx.noalias": True, "s_tir": True})})


def without_spans(func: Any) -> Any:
    """Return the function without the files and lines that its statements were read from.

    TVM's script parser keeps the absolute path of the source; what is saved with it differs from checkout to checkout.
    """
    graph = json.loads(tvm.ir.save_json(func))
    spans = {place for place, node in enumerate(graph["nodes"]) if node["type"] in _SPANS}
    if not spans:
        return func
    for node in graph["nodes"]:
        fields = node.get("data")
        if isinstance(fields, dict) and fields.get("span") in spans:
            fields["span"] = 0  # the node of None
    return tvm.ir.load_json(json.dumps(graph))


def private_module(func: Any) -> tvm.IRModule:
    """Return the canonical module of a copy of the function, to be scheduled where the function itself is kept.

    TVM's schedules change blocks in place that one statement alone refers to, also where two functions share that statement.
    """
    return load(save(canonical_module(func)))


def signature_of(func: Any) -> list[tuple[tuple[int, ...], str]]:
    """Return (shape, dtype) of each buffer parameter; raise TypeError for scalars, ValueError for dynamic extents."""
    args = []
    for param in func.params:
        if not isinstance(param.ty, tvm.tirx.buffer.BufferType):
            raise TypeError(f"parameter {param.name} is not a buffer")
        if not all(isinstance(extent, tvm.tirx.IntImm) for extent in param.shape):
            extents = ", ".join(str(getattr(extent, "value", extent)) for extent in param.shape)
            raise ValueError(f"parameter {param.name} has a dynamic extent: [{extents}]")
        args.append((tuple(int(extent) for extent in param.shape), str(param.dtype)))
    return args


def _check_signature(func: Any, signature: Signature) -> None:
    got, want = signature_of(func), [(arg.shape, arg.dtype) for arg in signature.args]
    if got != want:
        raise ValueError(f"lower() gives arguments {got}, but signature() says {want}")


def canonical_text(mod: tvm.IRModule) -> str:
    """Return the module's script with every variable, buffer and block renamed in order of definition.

    Two modules with one text compute the same in the same way, whatever names, attributes or comments their authors
    chose. TVM's own hash differs between its releases; this text must not.
    """
    return "".join(f"{line}\n" for line in canonical_lines(code_lines(mod)))


def code_lines(mod: tvm.IRModule) -> list[str]:
    """Return the lines of the module's script but for comments and empty ones."""
    script = mod["main"].script(show_meta=True)
    return [line for line in script.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def nests(mod: tvm.IRModule) -> list[list[str]]:
    """Return the lines of each outermost loop nest of the module's script."""
    lines = code_lines(mod)
    starts = [at for at, line in enumerate(lines) if line.startswith(_NEST)]
    return [lines[start:end] for start, end in itertools.pairwise([*starts, len(lines)])]


def canonical_lines(lines: Iterable[str]) -> list[str]:
    """Return a script's lines with variables renamed in order of definition, or of use where they are defined elsewhere."""
    names = _Names()
    return [names.renamed(line) for line in lines]


class _Names:
    """Assigns new names to a function's definitions; a later definition of a name hides the earlier one."""

    def __init__(self) -> None:
        self._current: dict[str, str] = {}
        self._count = 0

    def renamed(self, line: str) -> str:
        """Return the line with every name replaced; the names that it defines are new from here on."""
        definition = _DEFINITION.match(line)
        if definition is None:
            return self._replaced(line)
        value = self._replaced(line[definition.end("names") :])
        for name in _NAME.finditer(definition["names"]):
            if name["name"]:
                self._define(name["name"])
        return definition["indent"] + (definition["loop"] or "") + self._replaced(definition["names"]) + value

    def _replaced(self, text: str) -> str:
        return _NAME.sub(self._replacement, text)

    def _replacement(self, match: re.Match[str]) -> str:
        text = match[0]
        if match["string"]:
            return f'"{self._define(text)}"' if match.string[: match.start()].endswith("T.sblock(") else text
        if match["name"] is None or match["keyword"] or text in _RESERVED:
            return text
        return self._current.get(text) or self._define(text)

    def _define(self, name: str) -> str:
        self._current[name] = f"v{self._count}"
        self._count += 1
        return self._current[name]


def module_digest(mod: tvm.IRModule) -> str:
    """Return the digest that stands for the module in keys."""
    return digest(canonical_text(mod).encode())


def save(mod: tvm.IRModule) -> str:
    """Return the module as JSON text that `load` reads in another process of the same TVM."""
    return str(tvm.ir.save_json(mod))


def load(text: str) -> tvm.IRModule:
    return tvm.ir.load_json(text)
