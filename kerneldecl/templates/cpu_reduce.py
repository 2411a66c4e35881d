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
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one reduction, its producers inlined and its consumers in its nest; None where it has another form."""
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    found = reductions.isolate_reduction(sch)
    if found is None or reductions.is_strided(found[0]) != ("columns" in params):
        return False
    first, rest = found
    if "columns" in params:
        nest = reductions.column_reduction(sch, first, reductions.ColumnTiling.of(params))
    else:
        lanes = blocks.lanes_of(first.block.writes[0].dtype, arch.the_cpu.vector_bytes)
        tiling = reductions.RowTiling(lanes, blocks.count(params, "vectors"), chunks=blocks.count(params, "chunks"))
        nest = reductions.row_reduction(sch, first, tiling)
    reductions.finish_nest(sch, nest, rest, params)
    return True
