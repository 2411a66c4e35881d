"""Owns specialised functions: PrimFuncs that come as they are to be compiled, in S-TIR or TIRx, without a trace that leads there.

Knows nothing of templates, of who wrote them, or of how they are compiled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tvm

from kerneldecl.compiler.canonical import load, save, signature_of
from kerneldecl.store.keys import digest

SCHEDULED = "tirx.is_scheduled"
"""The attribute with which TVM's passes tell each other that a function has its schedule."""
_OPAQUE = 8
"""Relax's kind of function of which nothing is known (relax/op_attr_types.h, OpPatternKind)."""
_PLACES = frozenset({"ir.Span", "ir.SequentialSpan", "ir.SourceName"})
"""What TVM's JSON holds of where a statement was written: a path and a line of somebody's machine."""


@dataclass(frozen=True)
class SpecialisedFunction:
    """What an artifact holds of one kernel, as TVM's JSON."""

    workload: str
    """The computation as a module, not scheduled."""
    function: str
    """The module that takes its place."""


def specialised_function(workload: tvm.IRModule, made: tvm.IRModule) -> SpecialisedFunction:
    return SpecialisedFunction(_without_places(workload), _without_places(made))


def _without_places(mod: tvm.IRModule) -> str:
    graph = json.loads(save(mod))
    graph["nodes"] = [{"type": "None"} if node["type"] in _PLACES else node for node in graph["nodes"]]
    return save(load(json.dumps(graph)))  # once more, for the nodes that nothing refers to


def specialised_module(made: tvm.IRModule, of: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose one PrimFunc takes the place of `main` in `of`; raise ValueError where it cannot."""
    functions = [func for func in made.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    if len(functions) != 1 or len(made.functions) != 1:
        raise ValueError(f"a specialised module holds {len(made.functions)} functions; expected one, a PrimFunc")
    got, want = signature_of(functions[0]), signature_of(of["main"])
    if got != want:
        raise ValueError(f"the specialised function takes {_shown(got)}; the workload takes {_shown(want)}")
    return tvm.IRModule({"main": functions[0].with_attr("global_symbol", "main")})


def _shown(signature: list[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype}[{', '.join(map(str, shape))}]" for shape, dtype in signature)


def is_tirx(func: Any) -> bool:
    """Say whether a function is TIRx, which TVM lowers by another pipeline than S-TIR."""
    return not (func.attrs or {}).get("s_tir", False)


def in_place_of(func: Any, scheduled: Any) -> Any:
    """Return a scheduled function as it stands in a model in place of the other: with its attributes, and marked scheduled."""
    attrs = {**dict(func.attrs or {}), SCHEDULED: True}
    if is_tirx(scheduled):
        # It has no blocks, which TVM's passes would look for: nothing is to be fused with it.
        attrs = {**{name: value for name, value in attrs.items() if name != "s_tir"}, "op_pattern": _OPAQUE}
    return scheduled.with_attr(attrs)


def specialised_digest(mod: tvm.IRModule) -> str:
    """Return the digest of the function as it is written: names are not made canonical, as TIRx declares variables apart from values."""
    return digest(mod["main"].script(show_meta=True).encode())
