"""Owns the schedule of one reduction with what comes before and after it element by element: sums, extremes, means.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction, everything before it inlined, everything after it computed where its results are.

    Where the largest operand is contiguous along a reduced axis: `vectors` registers hold partial results. Where it is
    contiguous along a spatial axis: `columns` of these are computed together, `steps` rows at a time. In both cases
    `chunks`: parts of the reduction computed apart; `parallel`: all cores.
    """
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    found = reductions.only_reduction(sch)
    if found is None or reductions.is_across(found[0]) != ("columns" in params):
        return False
    first, rest = found
    if "columns" in params:
        columns = reductions.ColumnCut(*(blocks.count(params, name) for name in ("columns", "steps", "chunks")))
        nest = reductions.column_reduction(sch, first, columns)
    else:
        lanes = blocks.lanes_of(first.block.writes[0].dtype, arch.the_cpu.vector_bytes)
        cut = reductions.RowCut(lanes, blocks.count(params, "vectors"), chunks=blocks.count(params, "chunks"))
        nest = reductions.row_reduction(sch, first, cut)
    reductions.complete(sch, nest, rest, params)
    return True
