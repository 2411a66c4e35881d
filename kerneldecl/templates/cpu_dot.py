"""Owns the schedule of matrix products on a CPU whose operands both lie along the reduction: vectors of partial sums, no packing.

Knows nothing of how its parameters are chosen, and recognises a product by its structure, never by its names.

Parameters:
  tile_m, tile_n    dot products that run together, each in a vector register of partial sums
  block_m, block_n  what one parallel task computes, in elements; multiples of the tile
  order             "mn": tasks and tiles go row by row; "nm": column by column
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared.contraction import (
    epilogue_of,
    is_tiled,
    merge,
    only_reduction,
    parallelize,
    product_of,
    vector_lanes,
    vectorize_lanes,
)


class _Tiles(NamedTuple):
    """The template's parameters, as read."""

    tile_m: int
    tile_n: int
    block_m: int
    block_n: int
    order: str


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled product with its epilogue fused, or None where tiles or vectors do not divide it or it is none."""
    tiles = _Tiles(**{name: params[name] for name in _Tiles._fields})  # type: ignore[arg-type]
    sch = Schedule(mod)
    block = only_reduction(sch)
    gemm = None if block is None else product_of(sch.get(block))
    if gemm is None or sch.get_producers(block):
        return None
    epilogue = epilogue_of(sch, block)
    extents = [int(axis.dom.extent) for axis in sch.get(block).iter_vars]
    m, n, k = extents[gemm.m], extents[gemm.n], extents[gemm.k]
    lanes = vector_lanes(arch, sch.get(block))
    if epilogue is None or m % tiles.tile_m or n % tiles.tile_n or k % lanes:
        return None
    if not is_tiled(m, tiles.tile_m, tiles.block_m) or not is_tiled(n, tiles.tile_n, tiles.block_n):
        return None
    tail = merge(sch, epilogue) if epilogue else sch.cache_write(block, 0, "global")

    # 1. One partial sum a lane; the block itself becomes the sum over the lanes.
    _, k_lane = sch.split(sch.get_loops(block)[gemm.k], [None, lanes])
    partial = sch.rfactor(k_lane, len(extents) - 1)

    # 2. Tile the sum over the lanes: tasks / register tiles / rows / columns / lanes.
    loops = sch.get_loops(block)
    m_task, m_tile, m_row = sch.split(loops[gemm.m], [None, tiles.block_m // tiles.tile_m, tiles.tile_m])
    n_task, n_tile, n_col = sch.split(loops[gemm.n], [None, tiles.block_n // tiles.tile_n, tiles.tile_n])
    is_by_row = tiles.order == "mn"
    tasks = [*(loops[axis] for axis in gemm.batch), *((m_task, n_task) if is_by_row else (n_task, m_task))]
    tile_loops = (m_tile, n_tile) if is_by_row else (n_tile, m_tile)
    sch.reorder(*tasks, *tile_loops, m_row, n_col)
    task = sch.fuse(*tasks)

    # 3. Compute a tile's partial sums where they are needed: reduction / unrolled rows and columns / lanes.
    sch.compute_at(partial, tile_loops[-1], preserve_unit_loops=True)
    lane, *axes = sch.get_loops(partial)[-1 - len(extents) :]
    k_step, row, col = axes[gemm.k], axes[gemm.m], axes[gemm.n]
    sch.reorder(k_step, row, col, lane)
    sch.unroll(row)
    sch.unroll(col)
    sch.vectorize(lane)

    # 4. Bring the epilogue to the tile that it completes. Loop kinds come first: the initialisation inherits them.
    sch.reverse_compute_at(tail, tile_loops[-1], preserve_unit_loops=True)
    parallelize(sch, task)
    sch.unroll(m_row)
    sch.unroll(n_col)
    vectorize_lanes(sch, sch.get_loops(tail)[-1], lanes)
    sch.decompose_reduction(partial, k_step)
    return sch
