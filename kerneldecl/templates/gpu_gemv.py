"""Owns the schedule on GPUs of GEMVs: each weight is read once, and unpacked in registers.

Knows nothing of policies or of how weights are packed.

Parameters:
  strided  whether the matrix is contiguous along a spatial axis instead of a reduction axis
  threads  threads that share a row; where strided, threads along the columns
  rows     rows of a thread block, or groups of `tile` rows; where strided, threads that share a column
  tile     rows that a thread computes together, with one load of the vector
  width    elements that a thread loads with one instruction
  unroll   loads of a thread in flight together
  chunks   chunks into which the reduction is split, for more thread blocks; a second kernel reduces over them
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.analysis.tensor_cores import first_capability
from kerneldecl.model import Arch, Gpu, Value
from kerneldecl.templates.gpu import thread_loops
from kerneldecl.templates.shared import blocks, reductions

QUAD = 4
"""Lanes of a warp that share a row of a fragment."""


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one reduction over a matrix and vectors, fused with the blocks around it; None where it has another form."""
    assert arch.gpu is not None, "templates for GPUs are proposed for GPUs alone"
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch.the_gpu))


def _schedule(sch: Schedule, params: Mapping[str, Value], gpu: Gpu) -> bool:
    found = reductions.isolate_reduction(sch)
    if found is None or len(found[0].block.reads) < 2 or reductions.is_strided(found[0]) != params["strided"]:
        return False
    return thread_loops.reduction(sch, found, params, is_paired=_is_paired(found[0], params, gpu))


def _is_paired(leaf: blocks.Leaf, params: Mapping[str, Value], gpu: Gpu) -> bool:
    """Say whether tensor cores can multiply 4-bit weights: rows in pairs, whole warps per row, and one scale for a quad's weights."""
    axis = reductions.contiguous_axis(leaf)
    names = [(access.dtype, len(access.shape)) for access in leaf.block.reads]
    if params["strided"] or axis is None or sorted(names) != [("float16", 1), ("float16", 2), ("uint8", 2)]:
        return False
    threads, width, tile, chunks = (blocks.count(params, name) for name in ("threads", "width", "tile", "chunks"))
    contiguous = leaf.block.axes[axis].extent
    largest = max(math.prod(access.shape) for access in leaf.block.reads)
    return (
        gpu.compute_capability >= first_capability("mma.sync")
        and tile % 2 == 0
        and threads % gpu.warp_size == 0
        and contiguous % (QUAD * width) == 0
        and largest // leaf.extent_of("spatial") % (threads * width * chunks) == 0
    )
