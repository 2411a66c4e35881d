"""Owns when a pipelined loop asks for its copies, and from where: some in each part of a step, all from one pointer.

Knows nothing of schedules, policies or what the loop computes.

Copies that are asked for at once keep ldmatrix waiting, which takes the same way to shared memory; so each part of a step asks
for some, between its loads and its multiplications. TVM computes each address from an index of 32 bits; with one pointer for all
and a distance that nvcc knows, a copy's address takes an addition of 64 bits.

It takes the loops that `barriers_cuda` leaves of those that load ahead: copies, a loop over the parts of a step, and the barrier
behind it.
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
    """Return device functions whose loops that load ahead ask for a share of their copies in each part of a step but the last."""
    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(For, _loop)])) for name, func in mod.functions.items()}
    )


def _loop(loop: Any) -> Any:
    steps = list(loop.body.seq) if isinstance(loop.body, SeqStmt) else []
    keys = [step.attr_key if isinstance(step, AttrStmt) else type(step).__name__ for step in steps]
    if keys[-3:] != [COMMIT, "For", WAIT] or COMMIT in keys[:-3]:
        return loop
    *before, copy, parts, wait = steps
    copies = list(copy.body.seq) if isinstance(copy.body, SeqStmt) else [copy.body]
    *loads, multiply = list(parts.body.seq)
    shares = [_share(each, parts) for each in copies if isinstance(each, For)]
    rest = [each for each in copies if not isinstance(each, For)]
    asking = SeqStmt([*rest, _with_body(parts, SeqStmt([*loads, *shares, multiply]))])
    return _with_body(loop, SeqStmt([*before, AttrStmt(copy.node, COMMIT, copy.value, asking), wait]))


def _share(copying: Any, parts: Any) -> Any:
    """Return the iterations of a loop that fall to one part of a step."""
    extent, number = int(copying.extent), int(parts.extent)
    share = -(-extent // number)
    at = Var(copying.loop_var.name, copying.loop_var.ty)
    place = parts.loop_var * share + at
    based = structural.structural_map(copying.body, [(Call, lambda call: _from_a_pointer(call, copying))])
    body = _put(based, copying.loop_var, place)
    some = body if extent % number == 0 else IfThenElse(place < extent, body, None)
    return For(at, 0, share, copying.kind, some)


def _from_a_pointer(call: Any, copying: Any) -> Any:
    """Return a loop's copy from a pointer that all iterations share and a distance from it, where that grows by as much with each."""
    if str(getattr(call.op, "name", "")) != COPY:
        return call
    to, place, source, index, *rest = call.args
    first, *others = (_put(index, copying.loop_var, tvm.tirx.const(step, "int32")) for step in range(int(copying.extent)))
    distances = [_ANALYZER.simplify(other - first) for other in others]
    if not all(isinstance(distance, IntImm) for distance in distances):
        return call
    stride = int(distances[0]) if distances else 0
    if [int(distance) for distance in distances] != [step * stride for step in range(1, len(distances) + 1)]:
        return call
    pointer = address_of(BufferLoad(source.args[0], [first]))
    args = [to, place, pointer, copying.loop_var * stride, *rest]
    return Call(call.op, args, call.attrs, call.ty_args, call.span, call.ty)


def _put(body: Any, var: Var, value: Any) -> Any:
    return structural.structural_map(body, [(Var, lambda each: value if each.same_as(var) else each)])


def _with_body(loop: Any, body: Any) -> Any:
    return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)
