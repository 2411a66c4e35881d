"""Owns the schedule of GEMMs on a CPU whose operands are both contiguous along k: vectors of partial results, no packing.

Knows nothing of how its parameters are chosen, and recognises a GEMM by its structure, never by its names.

Parameters:
  tile_m, tile_n    rows and columns of a register tile: dot products that run together, each in a vector register of partial results
  block_m, block_n  rows and columns of a parallel task's block; multiples of the tile
  order             order of tasks and of tiles: "mn" row by row, "nm" column by column
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import (
    Gemm,
    GemmTiles,
    finish_rest,
    merge_epilogue,
    parallelize,
    read_gemm,
    tile_loops,
    vector_lanes,
    vectorize_lanes,
)
from kerneldecl.templates.shared.contraction import epilogue_of


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled GEMM with its epilogue fused, or None where the function is none or blocks or vectors do not divide it."""
    tiles, gemm = GemmTiles.of(params), read_gemm(mod)
    if gemm is None or gemm.computed:
        return None
    sch, block, axes, (m, n, k) = gemm.sch, gemm.block, gemm.axes, gemm.mnk
    lanes = vector_lanes(arch, sch.get(block))
    if n % tiles.tile_n or k % lanes or not tiles.divide(m, n):
        return None
    tail = merge_epilogue(sch, block, _padded(gemm, tiles.tile_m, lanes) if m % tiles.tile_m else gemm.epilogue)

    # 1. One partial result per lane; the block itself becomes the reduction over lanes.
    _, k_lane = sch.split(sch.get_loops(block)[axes.k], [None, lanes])
    partial = sch.rfactor(k_lane, len(gemm.extents) - 1)

    # 2. Tile the reduction over lanes: tasks / register tiles / rows / columns / lanes.
    task, tile, m_row, n_col = tile_loops(gemm, tiles, sch.get_loops(block))

    # 3. Compute a tile's partial results in the tile: reduction / unrolled rows and columns / lanes.
    sch.compute_at(partial, tile, preserve_unit_loops=True)
    lane, *loops = sch.get_loops(partial)[-1 - len(gemm.extents) :]
    k_step, row, col = loops[axes.k], loops[axes.m], loops[axes.n]
    sch.reorder(k_step, row, col, lane)
    sch.unroll(row)
    sch.unroll(col)
    sch.vectorize(lane)

    # 4. Move the epilogue to the tile that it completes. Loop kinds come first: the initialisation inherits them.
    sch.reverse_compute_at(tail, tile, preserve_unit_loops=True)
    parallelize(sch, task)
    sch.unroll(m_row)
    sch.unroll(n_col)
    vectorize_lanes(sch, sch.get_loops(tail)[-1], lanes)
    sch.decompose_reduction(partial, k_step)
    finish_rest(sch, gemm.rest, lanes)
    return sch


def _padded(gemm: Gemm, tile_m: int, lanes: int) -> Sequence[Any]:
    """Pad the rows to whole tiles, by a copy of their operand; return the epilogue, which then begins with a copy back."""
    sch, block = gemm.sch, gemm.block
    sch.pad_einsum(block, [tile_m if axis == gemm.axes.m else 1 for axis in range(len(gemm.extents))])
    for copy in sch.get_producers(block):
        *outer, inner = sch.get_loops(copy)
        parallelize(sch, sch.fuse(*outer))
        vectorize_lanes(sch, inner, lanes)
    return epilogue_of(sch, block) or ()
