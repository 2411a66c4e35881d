"""Owns the schedule on GPUs of functions that no other template takes: one kernel per block, one thread per result.

Knows nothing of policies or of any one operator.

Parameters:
  threads  threads of a block
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of each block as a kernel of its own, cheap ones inlined; None where a block cannot be read."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, blocks.count(params, "threads")))


def _schedule(sch: Schedule, threads: int) -> bool:
    blocks.inline_producers(sch, keep_shared=True)
    blocks.add_missing_loops(sch)
    found = blocks.leaves(sch)
    if found is None:
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
            sch.decompose_reduction(leaf.rv, sch.get_loops(leaf.rv)[2 + spatial])
    return True
