"""Owns the schedule on CPUs of one reduction with elementwise producers and consumers: sums, extremes, means.

Knows nothing of policies or of any one operator.

Parameters:
  parallel  True runs on all cores
  chunks    chunks into which the reduction is split
where the largest operand is contiguous along a reduction axis:
  vectors   vector registers with partial results of a row
where it is contiguous along a spatial axis:
  columns   columns computed together
  steps     rows accumulated per iteration
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.reduction import schedule_reduction
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one reduction, its producers inlined and its consumers in its nest; None where it has another form."""

    def row_nest(sch: Schedule, leaf: blocks.Leaf, lanes: int) -> reductions.Nest:
        tiling = reductions.RowTiling(lanes, blocks.count(params, "vectors"), chunks=blocks.count(params, "chunks"))
        return reductions.row_reduction(sch, leaf, tiling)

    return blocks.attempt(mod, lambda sch: schedule_reduction(sch, params, arch, row_nest, min_reads=0))
