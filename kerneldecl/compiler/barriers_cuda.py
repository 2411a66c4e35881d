"""Owns how often the threads of a pipelined loop wait for one another: once a step where TVM has them wait twice.

Knows nothing of schedules, policies or what the loop computes.

TVM's order of a step is: all have computed; copy ahead; the copies of this step have arrived; all see them; compute. One barrier
does for both where the copies come after it: those of this step were asked for steps ago. Copies ahead then also overlap with
computing, which nothing separates from them any more.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm.ir import Call
from tvm.tirx import AttrStmt, Evaluate, For, SeqStmt
from tvm_ffi import structural

COMMIT, WAIT, IN_FLIGHT, SYNC = "async_commit_queue_scope", "async_wait_queue_scope", "async_wait_inflight_count", "tirx.tvm_storage_sync"


def one_barrier(mod: tvm.IRModule) -> tvm.IRModule:
    """Return device functions whose loops with three stages or more wait for their copies before they ask for more."""
    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(For, _loop)])) for name, func in mod.functions.items()}
    )


def _loop(loop: Any) -> Any:
    steps = list(loop.body.seq) if isinstance(loop.body, SeqStmt) else []
    keys = [step.attr_key if isinstance(step, AttrStmt) else "" for step in steps]
    if keys[-2:] != [COMMIT, WAIT] or COMMIT in keys[:-2]:
        return loop
    copy, wait = steps[-2:]
    count = wait.body
    copying, computing = _without_sync(copy.body), _without_sync(count.body)
    if count.attr_key != IN_FLIGHT or int(count.value) < 2 or copying is None or computing is None:
        return loop
    body = SeqStmt([copying[0], AttrStmt(copy.node, COMMIT, copy.value, SeqStmt(copying[1])), *computing[1]])
    waited = AttrStmt(wait.node, WAIT, wait.value, AttrStmt(count.node, IN_FLIGHT, count.value - 1, body))
    changed = SeqStmt([*steps[:-2], waited]) if steps[:-2] else waited
    return For(loop.loop_var, loop.min, loop.extent, loop.kind, changed, loop.thread_binding, loop.annotations)


def _without_sync(body: Any) -> tuple[Any, list[Any]] | None:
    """Return a sequence's one barrier and all else in it, None where it has not just one."""
    steps = list(body.seq) if isinstance(body, SeqStmt) else []
    found = [step for step in steps if isinstance(step, Evaluate) and isinstance(step.value, Call) and step.value.op.name == SYNC]
    return (found[0], [step for step in steps if not step.same_as(found[0])]) if len(found) == 1 else None
