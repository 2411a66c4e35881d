"""Owns the schedule of matrix products on a CPU: packed panels, register tiles, cache blocks.

Knows nothing of how its parameters are chosen, and recognises a product by its structure, never by its names.

Parameters:
  tile_m, tile_n    accumulators that stay in registers while the reduction runs; tile_n is the vectorized side
  block_m, block_n  what one parallel task computes, in elements; multiples of the tile
  block_k           reduction steps between two visits of the accumulators in memory; 0 runs through at once
  pack_m, pack_n    copy the operand indexed by m (by n) into panels, in which a register tile reads consecutive addresses
  order             "mn": tasks and tiles go row by row; "nm": column by column
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.shared.contraction import (
    Panels,
    epilogue_of,
    is_tiled,
    merge,
    only_reduction,
    pack,
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
    block_k: int
    pack_m: bool
    pack_n: bool
    order: str


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled product with its epilogue fused, or None where the function is not one matrix product."""
    tiles = _Tiles(**{name: params[name] for name in _Tiles._fields})  # type: ignore[arg-type]
    sch = Schedule(mod)
    block = only_reduction(sch)
    gemm = None if block is None else product_of(sch.get(block))
    if gemm is None or sch.get_producers(block):
        return None
    epilogue = epilogue_of(sch, block)
    extents = [int(axis.dom.extent) for axis in sch.get(block).iter_vars]
    m, n, k = extents[gemm.m], extents[gemm.n], extents[gemm.k]
    if epilogue is None or not is_tiled(m, tiles.tile_m, tiles.block_m) or not is_tiled(n, tiles.tile_n, tiles.block_n):
        return None
    lanes = vector_lanes(arch, sch.get(block))
    is_blocked = 0 < tiles.block_k < k
    is_parallel = bool(gemm.batch) or m > tiles.block_m or n > tiles.block_n

    # 1. Pad what the tiles do not divide. The copies that pad are the packed panels; the copy back joins the epilogue.
    padding = [1] * len(extents)
    padding[gemm.m], padding[gemm.n], padding[gemm.k] = tiles.tile_m, tiles.tile_n, tiles.block_k if is_blocked else 1
    ragged = {axis for axis, (extent, unit) in enumerate(zip(extents, padding, strict=True)) if extent % unit}
    if ragged:
        sch.pad_einsum(block, padding)
        epilogue = epilogue_of(sch, block)
    tail = merge(sch, epilogue) if epilogue else sch.cache_write(block, 0, "global")

    # 2. Pack the operands.
    for operand, axis, tile, is_wanted in (
        (gemm.a, gemm.m, tiles.tile_m, tiles.pack_m),
        (gemm.b, gemm.n, tiles.tile_n, tiles.pack_n),
    ):
        is_padded = bool(ragged & {axis, gemm.k})
        if is_wanted and not is_padded:
            sch.cache_read(block, operand.position, "global")
        if is_wanted or is_padded:
            rest = tuple(dim for dim in range(operand.rank) if dim not in {operand.spatial_dim, operand.reduce_dim})
            pack(sch, block, operand.position, Panels(operand.spatial_dim, tile, rest, (operand.reduce_dim,)), is_parallel=is_parallel)

    # 3. Tile: tasks / reduction blocks / register tiles / reduction / unrolled rows / vector columns.
    loops = sch.get_loops(block)
    m_task, m_tile, m_row = sch.split(loops[gemm.m], [None, tiles.block_m // tiles.tile_m, tiles.tile_m])
    n_task, n_tile, n_col = sch.split(loops[gemm.n], [None, tiles.block_n // tiles.tile_n, tiles.tile_n])
    k_loops = sch.split(loops[gemm.k], [None, tiles.block_k]) if is_blocked else [loops[gemm.k]]
    is_by_row = tiles.order == "mn"
    tasks = [*(loops[axis] for axis in gemm.batch), *((m_task, n_task) if is_by_row else (n_task, m_task))]
    tile_loops = (m_tile, n_tile) if is_by_row else (n_tile, m_tile)
    sch.reorder(*tasks, *k_loops[:-1], *tile_loops, k_loops[-1], m_row, n_col)
    task = sch.fuse(*tasks)

    # 4. Bring the epilogue to the tile that it completes. Loop kinds come first: the initialisation inherits them.
    sch.reverse_compute_at(tail, task if is_blocked else tile_loops[-1], preserve_unit_loops=True)
    parallelize(sch, task)
    sch.unroll(m_row)
    vectorize_lanes(sch, n_col, lanes)
    vectorize_lanes(sch, sch.get_loops(tail)[-1], lanes)
    sch.decompose_reduction(block, k_loops[0])
    return sch
