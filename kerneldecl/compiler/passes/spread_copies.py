"""Owns where a pipelined loop issues its cp.async: some in each k-slice of an iteration, all relative to one pointer.

Knows nothing of schedules, policies or what the loop computes.

Copies issued back to back stall ldmatrix, which uses the same path to shared memory. So each k-slice of an iteration issues some of
them, between its ldmatrix and its mma. TVM computes each address from a 32-bit index; with one base pointer and constant offsets
that nvcc knows, the address of a copy takes one 64-bit addition.

The pass applies to the loops with register double buffering as `single_barrier` leaves them: copies, a loop over the k-slices, and
the barrier after it.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.ir import Call, Var
from tvm.sym import Analyzer
from tvm.tirx import AttrStmt, BufferLoad, For, IfThenElse, IntImm, SeqStmt, address_of
from tvm_ffi import structural

from kerneldecl.compiler.passes.single_barrier import COMMIT, WAIT

COPY = "tirx.s_tir.cp_async_raw"
_ANALYZER = Analyzer()


def spread_copies(mod: tvm.IRModule) -> tvm.IRModule:
    """Return device functions whose double-buffered loops issue some of their copies in each k-slice of an iteration but the last."""
    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(For, _loop)])) for name, func in mod.functions.items()}
    )


def _loop(loop: Any) -> Any:
    stmts = list(loop.body.seq) if isinstance(loop.body, SeqStmt) else []
    keys = [stmt.attr_key if isinstance(stmt, AttrStmt) else type(stmt).__name__ for stmt in stmts]
    if keys[-3:] != [COMMIT, "For", WAIT] or COMMIT in keys[:-3]:
        return loop
    *before, copy, slices, wait = stmts
    copies = list(copy.body.seq) if isinstance(copy.body, SeqStmt) else [copy.body]
    *loads, multiply = list(slices.body.seq)
    spread = [_slice_of_copies(each, slices) for each in copies if isinstance(each, For)]
    rest = [each for each in copies if not isinstance(each, For)]
    issuing = SeqStmt([*rest, _with_body(slices, SeqStmt([*loads, *spread, multiply]))])
    return _with_body(loop, SeqStmt([*before, AttrStmt(copy.node, COMMIT, copy.value, issuing), wait]))


def _slice_of_copies(copying: Any, slices: Any) -> Any:
    """Return the iterations of a copying loop that one k-slice issues."""
    extent, number = int(copying.extent), int(slices.extent)
    per_slice = -(-extent // number)
    at = Var(copying.loop_var.name, copying.loop_var.ty)
    place = slices.loop_var * per_slice + at
    based = structural.structural_map(copying.body, [(Call, lambda call: _from_base_pointer(call, copying))])
    body = _substituted(based, copying.loop_var, place)
    some = body if extent % number == 0 else IfThenElse(place < extent, body, None)
    return For(at, 0, per_slice, copying.kind, some)


def _from_base_pointer(call: Any, copying: Any) -> Any:
    """Return a loop's copy relative to one base pointer, where the offset grows by the same stride with each iteration."""
    if str(getattr(call.op, "name", "")) != COPY:
        return call
    to, place, source, index, *rest = call.args
    first, *others = (_substituted(index, copying.loop_var, tvm.tirx.const(at, "int32")) for at in range(int(copying.extent)))
    offsets = [_ANALYZER.simplify(other - first) for other in others]
    if not all(isinstance(offset, IntImm) for offset in offsets):
        return call
    stride = int(offsets[0]) if offsets else 0
    if [int(offset) for offset in offsets] != [at * stride for at in range(1, len(offsets) + 1)]:
        return call
    pointer = address_of(BufferLoad(source.args[0], [first]))
    args = [to, place, pointer, copying.loop_var * stride, *rest]
    return Call(call.op, args, call.attrs, call.ty_args, call.span, call.ty)


def _substituted(body: Any, var: Var, value: Any) -> Any:
    return structural.structural_map(body, [(Var, lambda each: value if each.same_as(var) else each)])


def _with_body(loop: Any, body: Any) -> Any:
    return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)
