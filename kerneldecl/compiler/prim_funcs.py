"""Owns traceless functions: PrimFuncs in S-TIR or TIRx that are compiled as they are, without a schedule's trace.

Knows nothing of templates, of who wrote the functions, or of how they are compiled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import tvm
from tvm_ffi import structural

from kerneldecl.compiler.canonical import load, save, signature_of
from kerneldecl.compiler.passes.nan import ATTRIBUTE, carried
from kerneldecl.store.keys import digest
from kerneldecl.toolchain.companions import VENDOR_CALLS

SCHEDULED = "tirx.is_scheduled"
"""The attribute by which TVM's passes mark a function as scheduled."""
OPAQUE = 8
"""Relax's kOpaque, the pattern of a function that nothing is fused with (relax/op_attr_types.h, OpPatternKind)."""
_SOURCE_NODES = frozenset({"ir.Span", "ir.SequentialSpan", "ir.SourceName"})
"""Nodes of TVM's JSON with the path and line where a statement was written, which differ between machines."""


@dataclass(frozen=True)
class TracelessFunction:
    """A traceless kernel as an artifact holds it, in TVM's JSON."""

    workload: str
    """The computation as a module, not scheduled."""
    function: str
    """The module that implements it."""


def traceless_function(workload: tvm.IRModule, implementation: tvm.IRModule) -> TracelessFunction:
    """Return a traceless kernel as an artifact holds it."""
    plain = tvm.IRModule({"main": workload["main"].without_attr(ATTRIBUTE)})  # as models have it
    return TracelessFunction(_without_source(plain), _without_source(implementation))


def _without_source(mod: tvm.IRModule) -> str:
    graph = json.loads(save(mod))
    graph["nodes"] = [{"type": "None"} if node["type"] in _SOURCE_NODES else node for node in graph["nodes"]]
    return save(load(json.dumps(graph)))  # once more, for the nodes that nothing refers to


def traceless_module(implementation: tvm.IRModule, of: tvm.IRModule) -> tvm.IRModule:
    """Return a module whose one PrimFunc implements `main` of `of`; raise ValueError where it cannot."""
    functions = [func for func in implementation.functions.values() if isinstance(func, tvm.tirx.PrimFunc)]
    if len(functions) != 1 or len(implementation.functions) != 1:
        raise ValueError(f"the module holds {len(implementation.functions)} functions; expected one, a PrimFunc")
    got, want = signature_of(functions[0]), signature_of(of["main"])
    if got != want:
        raise ValueError(f"the function takes {_as_text(got)}; the workload takes {_as_text(want)}")
    return tvm.IRModule({"main": carried(functions[0], of["main"]).with_attr("global_symbol", "main")})


def _as_text(signature: list[tuple[tuple[int, ...], str]]) -> str:
    return ", ".join(f"{dtype}[{', '.join(map(str, shape))}]" for shape, dtype in signature)


def is_tirx(func: Any) -> bool:
    """Say whether a function is TIRx, which TVM lowers by another pipeline than S-TIR."""
    return not (func.attrs or {}).get("s_tir", False)


def calls_vendor_library(func: Any) -> bool:
    """Say whether a function calls a vendor's library, so that it is no kernel without what is linked with its object."""
    called: list[str] = []
    structural.structural_walk(
        func.body, [(tvm.ir.Call, lambda call: called.append(str(getattr(next(iter(call.args), None), "value", ""))))]
    )
    return not VENDOR_CALLS.isdisjoint(called)


def in_place_of(func: Any, scheduled: Any) -> Any:
    """Return a scheduled function that replaces `func` in a model: with the attributes of `func`, and marked scheduled."""
    attrs = {**dict(func.attrs or {}), SCHEDULED: True}
    if is_tirx(scheduled):
        # It has no blocks, which TVM's fusion passes look for: nothing may be fused with it.
        attrs = {**{name: value for name, value in attrs.items() if name != "s_tir"}, "op_pattern": OPAQUE}
    return scheduled.with_attr(attrs)


def traceless_digest(mod: tvm.IRModule) -> str:
    """Return the digest of the function as it is written; names are not canonical, as TIRx declares variables before it assigns them."""
    return digest(traceless_text(mod))


def traceless_text(mod: tvm.IRModule) -> bytes:
    """Return the function as it is written."""
    return str(mod["main"].script(show_meta=True)).encode()
