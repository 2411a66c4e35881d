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
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the schedule of one reduction over a matrix and vectors, fused with the blocks around it; None where it has another form."""
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    found = reductions.isolate_reduction(sch)
    if found is None or len(found[0].block.reads) < 2 or reductions.is_strided(found[0]) != ("columns" in params):
        return False
    gemv, rest = found
    if "columns" in params:
        nest = reductions.column_reduction(sch, gemv, reductions.ColumnTiling.of(params))
    else:
        lanes = blocks.lanes_of(gemv.block.writes[0].dtype, arch.the_cpu.vector_bytes)
        vectors, rows, chunks = (blocks.count(params, name) for name in ("vectors", "rows", "chunks"))
        tiling = reductions.RowTiling(lanes=lanes, vectors=vectors, rows=rows, chunks=chunks)
        if gemv.extent_of("spatial") % tiling.rows:
            return False
        _deinterleave(sch, gemv, lanes)
        nest = reductions.row_reduction(sch, gemv, tiling)
    reductions.finish_nest(sch, nest, rest, params)
    return True


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
