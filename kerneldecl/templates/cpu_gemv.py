"""Owns the schedule of matrix-vector products: each weight is read once, and unpacked where it is used.

Knows nothing of policies or of how weights are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared import blocks, reductions


def apply(mod: tvm.IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Schedule one reduction over a matrix and vectors, everything before it inlined, everything after it in its rows.

    Where the matrix is contiguous along a reduced axis: `rows` of it at a time share what is loaded of the vector, and
    `vectors` registers hold partial results of each row. Where it is contiguous along a spatial axis: `columns` of
    these are computed together, `steps` rows at a time, the reduction in `chunks`. `parallel`: all cores.
    """
    return blocks.attempt(mod, lambda sch: _schedule(sch, params, arch))


def _schedule(sch: Schedule, params: Mapping[str, Value], arch: Arch) -> bool:
    found = reductions.only_reduction(sch)
    if found is None or len(found[0].block.reads) < 2 or reductions.is_across(found[0]) != ("columns" in params):
        return False
    gemm, rest = found
    if "columns" in params:
        columns = reductions.ColumnCut(*(blocks.count(params, name) for name in ("columns", "steps", "chunks")))
        nest = reductions.column_reduction(sch, gemm, columns)
    else:
        lanes = blocks.lanes_of(gemm.block.writes[0].dtype, arch.the_cpu.vector_bytes)
        cut = reductions.RowCut(lanes, *(blocks.count(params, name) for name in ("vectors", "rows", "chunks")))
        if gemm.extent_of("spatial") % cut.rows:
            return False
        _unzip(sch, gemm, lanes)
        nest = reductions.row_reduction(sch, gemm, cut)
    reductions.complete(sch, nest, rest, params)
    return True


def _unzip(sch: Schedule, gemm: blocks.Leaf, lanes: int) -> None:
    """Copy each small operand that is read with a stride along the vectors so that vectors are contiguous in the copy.

    Elements of a byte's nibbles alternate in the other operand: all that meet the first nibble come first in the copy.
    """
    _, along, reused = reductions.row_parts(gemm, lanes)
    if len(reused) != 1:
        return
    for at, access in enumerate(gemm.block.reads):
        walk = blocks.strides(access, len(gemm.loops))
        ways = walk[along[-1]]
        if len(access.shape) == 1 and ways == gemm.block.axes[reused[0]].extent and walk[reused[0]] == 1:
            sch.cache_read(gemm.rv, at, "global")
            sch.transform_layout(gemm.rv, ("read", at), _by_remainder(ways))


def _by_remainder(ways: int) -> Callable[[Any], tuple[Any, Any]]:
    return lambda i: (i % ways, i // ways)
