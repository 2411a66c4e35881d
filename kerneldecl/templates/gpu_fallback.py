"""Owns the schedule on GPUs of functions that no other template fits: each block by itself, a thread for each result.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates import _blocks, _gpu_blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule each block as a kernel of its own, cheap ones inlined, in blocks of `threads` threads."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return _blocks.attempt(mod, lambda sch: _schedule(sch, _blocks.count(params, "threads")))


def _schedule(sch: Schedule, threads: int) -> bool:
    _blocks.inline_producers(sch, keep_shared=True)
    _blocks.give_loops(sch)
    found = _blocks.leaves(sch)
    if found is None:
        return False
    for leaf in found:
        # 1. Neighbouring threads on neighbouring results, as they lie in memory; what is reduced inside of them.
        order = _gpu_blocks.written_order(leaf)
        spatial = leaf.loops_of("spatial") if order is None else [leaf.loops[at] for at in order if leaf.block.axes[at].kind == "spatial"]
        reduce = leaf.loops_of("reduce")
        sch.reorder(*spatial, *reduce)
        loop = sch.fuse(*spatial) if spatial else sch.add_unit_loop((reduce or sch.get_loops(leaf.rv) or [leaf.rv])[0])
        grid, tx = sch.split(loop, [None, threads])
        sch.bind(grid, "blockIdx.x")
        sch.bind(tx, "threadIdx.x")
        # 2. Sums in registers.
        if reduce:
            copy = sch.cache_write(leaf.rv, 0, "local")
            sch.reverse_compute_at(copy, tx, preserve_unit_loops=True)
            sch.decompose_reduction(leaf.rv, reduce[0])
    return True
