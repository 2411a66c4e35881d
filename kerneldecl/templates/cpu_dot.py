"""Owns the schedule of GEMMs on a CPU whose operands are both contiguous along k: vectors of partial results, no packing.

Knows nothing of how its parameters are chosen, and recognises a GEMM by its structure, never by its names.

Parameters:
  tile_m, tile_n    rows and columns of a register tile: dot products that run together, each in a vector register of partial results
  block_m, block_n  rows and columns of a parallel task's block; multiples of the tile
  order             order of tasks and of tiles: "mn" row by row, "nm" column by column
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import (
    GemmTiles,
    finish_rest,
    merge_epilogue,
    parallelize,
    read_gemm,
    tile_loops,
    vector_lanes,
    vectorize_lanes,
)


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled GEMM with its epilogue fused, or None where the function is none or tiles or vectors do not divide it."""
    tiles, gemm = GemmTiles.of(params), read_gemm(mod)
    if gemm is None:
        return None
    sch, block, axes, (m, n, k) = gemm.sch, gemm.block, gemm.axes, gemm.mnk
    lanes = vector_lanes(arch, sch.get(block))
    if m % tiles.tile_m or n % tiles.tile_n or k % lanes or not tiles.divide(m, n):
        return None
    tail = merge_epilogue(sch, block, gemm.epilogue)

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
