"""Owns the schedule on GPUs of matrix-vector products: each weight is read once, and unpacked in registers.

Knows nothing of policies or of how weights are packed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import FIRST_CAPABILITY
from kerneldecl.model import Arch, Gpu, Value
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks, reductions

QUAD = 4
"""Lanes of a warp that share a row of a fragment."""


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction over a matrix and vectors, everything before it inlined, everything after it in its rows.

    Parameters as those of gpu_reduce; besides, a thread computes `tile` rows together and loads the vector once for them.
    """
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch.the_gpu))


def _schedule(sch: Schedule, params: Mapping[str, Value], gpu: Gpu) -> bool:
    found = reductions.only_reduction(sch)
    if found is None or len(found[0].block.reads) < 2 or reductions.is_across(found[0]) != params["strided"]:
        return False
    return thread_loops.reduction(sch, found, params, is_paired=_is_paired(found[0], params, gpu))


def _is_paired(leaf: blocks.Leaf, params: Mapping[str, Value], gpu: Gpu) -> bool:
    """Say whether tensor cores may multiply 4-bit weights: pairs of rows, whole warps on one row, quads on weights of one scale."""
    axis = reductions.contiguous_axis(leaf)
    names = [(access.dtype, len(access.shape)) for access in leaf.block.reads]
    if params["strided"] or axis is None or sorted(names) != [("float16", 1), ("float16", 2), ("uint8", 2)]:
        return False
    threads, width, tile, chunks = (blocks.count(params, name) for name in ("threads", "width", "tile", "chunks"))
    run = leaf.block.axes[axis].extent
    largest = max(math.prod(access.shape) for access in leaf.block.reads)
    return (
        gpu.compute_capability >= FIRST_CAPABILITY
        and tile % 2 == 0
        and threads % gpu.warp_size == 0
        and run % (QUAD * width) == 0
        and largest // leaf.extent_of("spatial") % (threads * width * chunks) == 0
    )
