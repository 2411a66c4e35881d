"""Owns the schedule of GEMVs on CPUs: each weight is read once, and unpacked where it is used.

Knows nothing of policies or of how weights are packed.

Parameters:
  parallel  True runs on all cores
  chunks    chunks into which the reduction is split
where the matrix is contiguous along a reduction axis:
  rows      rows computed together, which share loads of the vector
  vectors   vector registers with partial results of each row
where it is contiguous along a spatial axis:
  columns   columns computed together
  steps     rows accumulated per iteration
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.reduction import schedule_reduction
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one reduction over a matrix and vectors, fused with the blocks around it; None where it has another form."""

    def row_nest(sch: Schedule, gemv: blocks.Leaf, lanes: int) -> reductions.Nest | None:
        vectors, rows, chunks = (blocks.count(params, name) for name in ("vectors", "rows", "chunks"))
        if gemv.extent_of("spatial") % rows:
            return None
        _deinterleave(sch, gemv, lanes)
        return reductions.row_reduction(sch, gemv, reductions.RowTiling(lanes=lanes, vectors=vectors, rows=rows, chunks=chunks))

    return blocks.attempt(mod, lambda sch: schedule_reduction(sch, params, arch, row_nest, min_reads=2))


def _deinterleave(sch: Schedule, gemv: blocks.Leaf, lanes: int) -> None:
    """Copy each vector operand that is read with a stride along the row, so that reads of the copy are contiguous.

    Where a weight byte has two nibbles, the vector's elements alternate between them: in the copy, those of the first nibble come first.
    """
    _, along, reused = reductions.row_axes(gemv, lanes)
    if len(reused) != 1:
        return
    for at, access in enumerate(gemv.block.reads):
        strides = blocks.strides(access, len(gemv.loops))
        ways = strides[along[-1]]
        if len(access.shape) == 1 and ways == gemv.block.axes[reused[0]].extent and strides[reused[0]] == 1:
            sch.cache_read(gemv.rv, at, "global")
            sch.transform_layout(gemv.rv, ("read", at), _by_remainder(ways))


def _by_remainder(ways: int) -> Callable[[Any], tuple[Any, Any]]:
    return lambda i: (i % ways, i // ways)
