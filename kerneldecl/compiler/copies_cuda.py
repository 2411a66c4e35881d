"""Owns when a pipelined loop asks for its copies: some in each part of a step, between loads and multiplications.

Knows nothing of schedules, policies or what the loop computes.

Copies that are asked for at once keep ldmatrix waiting, which takes the same way to shared memory. It takes the loops that
`barriers_cuda` leaves of those that load ahead: copies, a loop over the parts of a step, and the barrier behind it.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.ir import Var
from tvm.tirx import AttrStmt, For, IfThenElse, SeqStmt
from tvm_ffi import structural

from kerneldecl.compiler.barriers_cuda import COMMIT, WAIT


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
    body = structural.structural_map(copying.body, [(Var, lambda var: place if var.same_as(copying.loop_var) else var)])
    some = body if extent % number == 0 else IfThenElse(place < extent, body, None)
    return For(at, 0, share, copying.kind, some)


def _with_body(loop: Any, body: Any) -> Any:
    return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)
