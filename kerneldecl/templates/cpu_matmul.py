"""Owns the schedule of GEMMs on a CPU: packed panels, register tiles, cache blocks.

Knows nothing of how its parameters are chosen, and recognises a GEMM by its structure, never by its names.

Parameters:
  tile_m, tile_n    rows and columns of a register tile, whose accumulators stay in registers over k; columns are vectorized
  block_m, block_n  rows and columns of a parallel task's block; multiples of the tile
  block_k           k-iterations between two accesses to accumulators in memory; 0 does not block k
  pack_m, pack_n    copy the operand that m (that n) indexes into panels, which a register tile reads contiguously; an operand that the
                    function computes, such as dequantised weights, is computed into them
  order             order of tasks and of tiles: "mn" row by row, "nm" column by column
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.gemm import (
    Gemm,
    GemmTiles,
    Panels,
    TaskLoops,
    finish_rest,
    finish_task,
    merge_epilogue,
    pack,
    read_gemm,
    tile_loops,
    vector_lanes,
)
from kerneldecl.templates.shared.contraction import epilogue_of


class _Packing(NamedTuple):
    """The parameters that this template has besides `GemmTiles`."""

    block_k: int
    pack_m: bool
    pack_n: bool


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled GEMM with its epilogue fused, or None where the function is no GEMM or blocks do not divide it."""
    tiles, packing = GemmTiles.of(params), _Packing(**{name: params[name] for name in _Packing._fields})  # type: ignore[arg-type]
    gemm = read_gemm(mod)
    if gemm is None:
        return None
    sch, block, axes, (m, n, k) = gemm.sch, gemm.block, gemm.axes, gemm.mnk
    if not tiles.divide(m, n) or not _packs_what_is_computed(gemm, packing):
        return None
    lanes = vector_lanes(arch, sch.get(block))
    is_blocked = 0 < packing.block_k < k
    is_parallel = bool(axes.batch) or m > tiles.block_m or n > tiles.block_n

    # 1. Pad what the tiles do not divide. The copies that pad become the packed panels; the copy back joins the epilogue.
    padding = [1] * len(gemm.extents)
    padding[axes.m], padding[axes.n], padding[axes.k] = tiles.tile_m, tiles.tile_n, packing.block_k if is_blocked else 1
    padded = {axis for axis, (extent, unit) in enumerate(zip(gemm.extents, padding, strict=True)) if extent % unit}
    if padded:
        sch.pad_einsum(block, padding)
    copied_back = sch.get_consumers(block)[:1] if gemm.rest else epilogue_of(sch, block) or ()
    tail = merge_epilogue(sch, block, copied_back if padded else gemm.epilogue)

    # 2. Pack the operands.
    _pack_operands(gemm, tiles, packing, padded, is_parallel=is_parallel)

    # 3. Tile: tasks / blocks of k / register tiles / k / unrolled rows / vectors of columns.
    loops = sch.get_loops(block)
    k_loops = sch.split(loops[axes.k], [None, packing.block_k]) if is_blocked else [loops[axes.k]]
    task, tile, row, column = tile_loops(gemm, tiles, loops, k_loops)

    # 4. Move the epilogue to the tile that it completes. Loop kinds come first: the initialisation inherits them.
    sch.reverse_compute_at(tail, task if is_blocked else tile, preserve_unit_loops=True)
    finish_task(sch, block, tail, TaskLoops(task, row, column, k_loops[0]), lanes)
    finish_rest(sch, gemm.rest, lanes)
    return sch


def _packs_what_is_computed(gemm: Gemm, packing: _Packing) -> bool:
    """Say whether the operands that the function computes are packed."""
    packed = {operand.position for operand, is_packed in ((gemm.axes.a, packing.pack_m), (gemm.axes.b, packing.pack_n)) if is_packed}
    return gemm.computed.keys() <= packed


def _pack_operands(gemm: Gemm, tiles: GemmTiles, packing: _Packing, padded: set[int], *, is_parallel: bool) -> None:
    """Pack the operands that the parameters name, and those whose axes are padded."""
    sch, block, axes, computed = gemm.sch, gemm.block, gemm.axes, gemm.computed
    for operand, axis, tile, is_wanted in (
        (axes.a, axes.m, tiles.tile_m, packing.pack_m),
        (axes.b, axes.n, tiles.tile_n, packing.pack_n),
    ):
        is_padded = bool(padded & {axis, axes.k})
        if is_wanted and not is_padded:
            sch.cache_read(block, operand.position, "global")
        if is_wanted or is_padded:
            rest = tuple(dim for dim in range(operand.rank) if dim not in {operand.spatial_dim, operand.reduce_dim})
            if operand.position in computed:
                sch.compute_inline(computed[operand.position])
            pack(sch, block, operand.position, Panels(operand.spatial_dim, tile, rest, (operand.reduce_dim,)), is_parallel=is_parallel)
