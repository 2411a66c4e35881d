"""Owns the schedule of one reduction with what comes before and after it element by element: sums, extremes, means.

Knows nothing of policies or of any one operator.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates import _blocks


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction, everything before it inlined, everything after it computed where its results are.

    Where the largest operand is contiguous along a reduced axis: `vectors` registers hold partial results. Where it is
    contiguous along a spatial axis: `columns` of these are computed together, `steps` rows at a time. In both cases
    `chunks`: parts of the reduction computed apart; `parallel`: all cores.
    """
    return _blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    # 1. One reduction, then spatial blocks alone.
    _blocks.inline_producers(sch)
    _blocks.give_loops(sch)
    found = _blocks.leaves(sch)
    if found is None or not found[0].block.is_reduction or any(leaf.block.is_reduction for leaf in found[1:]):
        return False
    first, *rest = found
    if not first.loops_of("reduce") or not first.block.reads:
        return False
    # 2. Along rows or down columns.
    chunks = _blocks.count(params, "chunks")
    column = _blocks.contiguous_axis(first)
    if column is not None and first.block.axes[column].kind == "spatial":
        if "columns" not in params:
            return False
        columns = _blocks.ColumnCut(_blocks.count(params, "columns"), _blocks.count(params, "steps"), chunks)
        nest = _blocks.column_reduction(sch, first, column, columns)
    else:
        if "vectors" not in params:
            return False
        lanes = _blocks.lanes_of(first.block.writes[0].dtype, arch.cpu.vector_bytes)
        nest = _blocks.row_reduction(sch, first, _blocks.RowCut(lanes, _blocks.count(params, "vectors"), chunks=chunks))
    # 3. What follows, unless it needs the chunks combined first.
    if chunks == 1:
        for leaf in rest:
            sch.reverse_compute_at(leaf.rv, nest.outer)
    if params["parallel"]:
        sch.parallel(nest.outer)
    _blocks.start(sch, nest)
    return True
