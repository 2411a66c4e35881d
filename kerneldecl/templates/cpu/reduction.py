"""Owns the choice on CPUs between the two nests of one reduction: down columns, or along rows, which its template schedules.

Knows nothing of policies, of the parameters of rows or of any one operator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks, reductions

RowNest = Callable[[Schedule, blocks.Leaf, int], reductions.Nest | None]
"""Schedules a reduction along rows, given the elements of a vector register; None where the parameters do not suit it."""


def schedule_reduction(sch: Schedule, params: Mapping[str, Value], arch: Arch, row_nest: RowNest, *, min_reads: int = 1) -> bool:
    """Schedule the function's one reduction, of so many operands at least, fused with the blocks around it; say whether it is done."""
    found = reductions.isolate_reduction(sch)
    if found is None or len(found[0].block.reads) < min_reads or reductions.is_strided(found[0]) != ("columns" in params):
        return False
    first, rest = found
    if "columns" in params:
        nest: reductions.Nest | None = reductions.column_reduction(sch, first, reductions.ColumnTiling.of(params))
    else:
        nest = row_nest(sch, first, blocks.lanes_of(first.block.writes[0].dtype, arch.the_cpu.vector_bytes))
    if nest is None:
        return False
    reductions.finish_nest(sch, nest, rest, params)
    return True
