"""Owns the schedule on GPUs of functions that no other template takes: one kernel per block, and one thread or thread block per result.

Knows nothing of policies or of any one operator.

Parameters:
  threads  threads of a block
  across   True gives each result of a reduction of at least so many steps a thread block, whose threads reduce together; False a thread
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of each block as a kernel of its own, cheap ones inlined; None where a block cannot be read."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    threads = blocks.count(params, "threads")
    if params["across"]:
        return blocks.attempt(mod, lambda sch: _schedule_in_place(sch, threads, across=True))
    return blocks.attempt(mod, lambda sch: _schedule(sch, threads)) or blocks.attempt(mod, lambda sch: _schedule_in_place(sch, threads))


def _schedule(sch: Schedule, threads: int) -> bool:
    blocks.inline_producers(sch, keep_shared=True)
    blocks.add_missing_loops(sch)
    found = blocks.leaves(sch)
    if found is None or any(len(leaf.block.writes) > 1 for leaf in found):
        return False
    for leaf in found:
        # 1. Adjacent threads on adjacent results in memory.
        reduce = leaf.loops_of("reduce")
        copy = sch.cache_write(leaf.rv, 0, "local")
        loops = sch.get_loops(copy)
        grid, tx = sch.split(sch.fuse(*loops) if loops else sch.add_unit_loop(copy), [None, threads])
        sch.bind(grid, "blockIdx.x")
        sch.bind(tx, "threadIdx.x")
        # 2. The reduction within a thread.
        sch.compute_at(leaf.rv, tx, preserve_unit_loops=True)
        if reduce:
            spatial = len(leaf.block.axes) - len(reduce)
            _decompose(sch, leaf.rv, sch.get_loops(leaf.rv)[2 + spatial])
    return True


def _schedule_in_place(sch: Schedule, threads: int, across: bool = False) -> bool:
    """Schedule each block where it is, its results in global memory: one of several results, or that cannot be moved under a thread.

    With `across`, the threads of a block share each reduction that is long enough; False is returned where none is.
    """
    blocks.inline_producers(sch, keep_shared=True)
    blocks.add_missing_loops(sch)
    found = blocks.leaves(sch)
    if found is None:
        return False
    is_shared = [across and leaf.extent_of("reduce") >= threads for leaf in found]
    for leaf, shared in zip(found, is_shared, strict=True):
        spatial, reduce = leaf.loops_of("spatial"), leaf.loops_of("reduce")
        if len(spatial) + len(reduce) > 1:
            sch.reorder(*spatial, *reduce)
        outer = sch.fuse(*spatial) if spatial else sch.add_unit_loop(sch.get_loops(leaf.rv)[0])
        if shared:
            sch.bind(outer, "blockIdx.x")
            _, tx = sch.split(sch.fuse(*reduce), [None, threads])
            sch.bind(tx, "threadIdx.x")
            continue
        grid, tx = sch.split(outer, [None, threads])
        sch.bind(grid, "blockIdx.x")
        sch.bind(tx, "threadIdx.x")
        if reduce:
            _decompose(sch, leaf.rv, reduce[0])
    return any(is_shared) or not across


def _decompose(sch: Schedule, block: Any, loop: Any) -> None:
    """Start an accumulator before a loop; where TVM cannot prove that, it is started by the first iteration."""
    with contextlib.suppress(ScheduleError):
        sch.decompose_reduction(block, loop)
