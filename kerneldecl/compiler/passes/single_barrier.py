"""Owns the barriers of a software-pipelined loop: one per iteration where TVM places two.

Knows nothing of schedules, policies or what the loop computes.

TVM's order of an iteration is: barrier; issue the copies of a later iteration; wait for the copies of this one; barrier; compute.
One barrier is enough if the copies are issued after it, since those of this iteration were issued several iterations ago. The
copies then also overlap with the computation, as no barrier separates them any more.

Where an iteration ends with the first fragment loads of the next one (`pipeline` of two loops), the tiles of the next iteration
must have arrived before those loads. One barrier there is enough as well: all loads of an iteration come before it, and the copies
of the next iteration overwrite what this one has loaded.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.ir import Call
from tvm.tirx import AttrStmt, Evaluate, For, SeqStmt
from tvm_ffi import structural

COMMIT, WAIT, IN_FLIGHT, SYNC = "async_commit_queue_scope", "async_wait_queue_scope", "async_wait_inflight_count", "tirx.tvm_storage_sync"


def one_barrier(mod: tvm.IRModule) -> tvm.IRModule:
    """Return device functions with one barrier per loop iteration: in loops that double-buffer registers, or have three stages or more."""
    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(For, _loop)])) for name, func in mod.functions.items()}
    )


def _loop(loop: Any) -> Any:
    stmts = list(loop.body.seq) if isinstance(loop.body, SeqStmt) else []
    keys = [stmt.attr_key if isinstance(stmt, AttrStmt) else "" for stmt in stmts]
    if keys.count(COMMIT) != 1 or keys.count(WAIT) != 1 or keys.index(WAIT) != keys.index(COMMIT) + 1:
        return loop
    at = keys.index(COMMIT)
    before, (copy, wait), after = stmts[:at], stmts[at : at + 2], stmts[at + 2 :]
    count = wait.body
    copying, computing = _without_sync(copy.body), _without_sync(count.body)
    if count.attr_key != IN_FLIGHT or copying is None or computing is None:
        return loop
    copied = AttrStmt(copy.node, COMMIT, copy.value, SeqStmt(copying[1]))
    if after:
        changed = [*before, copied, *computing[1], _after_wait(wait, int(count.value), [computing[0], *after])]
    elif int(count.value) >= 2:
        changed = [*before, _after_wait(wait, int(count.value) - 1, [copying[0], copied, *computing[1]])]
    else:
        return loop
    body = SeqStmt(changed) if len(changed) > 1 else changed[0]
    return For(loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations)


def _after_wait(wait: Any, in_flight: int, body: list[Any]) -> Any:
    """Return statements that run when all but `in_flight` groups of copies have arrived."""
    count = wait.body
    return AttrStmt(wait.node, WAIT, wait.value, AttrStmt(count.node, IN_FLIGHT, tvm.tirx.const(in_flight, "int32"), SeqStmt(body)))


def _without_sync(body: Any) -> tuple[Any, list[Any]] | None:
    """Return a sequence's only barrier and its other statements; None unless it has exactly one barrier."""
    stmts = list(body.seq) if isinstance(body, SeqStmt) else []
    found = [stmt for stmt in stmts if isinstance(stmt, Evaluate) and isinstance(stmt.value, Call) and stmt.value.op.name == SYNC]
    return (found[0], [stmt for stmt in stmts if not stmt.same_as(found[0])]) if len(found) == 1 else None
