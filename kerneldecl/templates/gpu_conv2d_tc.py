"""Owns the schedule of convolutions on tensor cores whose windows overlap: a block's part of the image is kept in shared memory once.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A product whose left operand is an image needs each pixel once for every window that has it. Copies of the windows, as the
template for products makes them, read the image that often, and where channels are few they are made element by element.
Here lanes pick the elements of their fragments out of the image itself; the weights are in shared memory whole.

Parameters:
  rows, columns       what one thread block computes of an image's results
  block_n             channels of the result that it computes
  warps_rows, warps_columns, warps_n    how the block's warps divide its rows, its columns (by 16 at least) and its channels
  smem_epilogue       1 has a block gather its results in shared memory, from where they are stored in whole rows; 0 has lanes store
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction, why_no_tensor_cores
from kerneldecl.compiler.intrinsics.mma import LANES, ROWS
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu.conv import normalize_windows, staged_image
from kerneldecl.templates.gpu.gemm import attempt, inline_sources, product_of
from kerneldecl.templates.gpu.mma_fragments import (
    clear_sums,
    intrinsics_of,
    keep_apart,
    load_by_matrices,
    placed,
    spread,
    spread_copy,
    store_sums,
    store_tile,
)
from kerneldecl.templates.shared.contraction import epilogue_of, merge, only_reduction

UNROLLED_STEPS = 16


class _Tiles(NamedTuple):
    """The template's parameters, as read."""

    rows: int
    columns: int
    block_n: int
    warps_rows: int
    warps_columns: int
    warps_n: int
    smem_epilogue: int

    @property
    def warps(self) -> int:
        return self.warps_rows * self.warps_columns * self.warps_n


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled convolution with its epilogue fused, or None where tensor cores do not take it."""
    tiles = _Tiles(**{name: params[name] for name in _Tiles._fields})  # type: ignore[arg-type]
    gemm = product_of(mod)
    if gemm is None or why_no_tensor_cores(gemm, arch.the_gpu) or not _fits(tiles, gemm):
        return None
    return attempt(mod, lambda sch: _schedule(sch, gemm, tiles))


def _fits(tiles: _Tiles, gemm: Contraction) -> bool:
    return (
        not gemm.batch
        and len(gemm.m) == 3
        and len(gemm.k) > 1
        and dtype_bytes(gemm.a.dtype) == 2
        and tiles.rows % tiles.warps_rows == 0
        and tiles.columns % (ROWS * tiles.warps_columns) == 0
        and tiles.block_n % (ROWS * tiles.warps_n) == 0
    )


def _schedule(sch: Schedule, gemm: Contraction, tiles: _Tiles) -> bool:
    # 1. Normal form: image, row, column, channel of the result, and one reduction; in whole tiles.
    block = only_reduction(sch)
    epilogue = None if block is None else epilogue_of(sch, block)
    if epilogue is None:
        return False
    if epilogue:
        merge(sch, epilogue)
    margin = sch.get_producers(block)
    normalize_windows(sch, block, gemm, [gemm.k])
    names = intrinsics_of(sch, block, gemm, a_k_last=True)
    sch.pad_einsum(block, [1, tiles.rows, tiles.columns, tiles.block_n, names.k])
    store = sch.cache_write(block, 0, "local")

    # 2. Tiles of blocks, warps, fragments.
    image, row, column, n, k = sch.get_loops(block)
    row, row_warp, row_part = sch.split(row, [None, tiles.warps_rows, tiles.rows // tiles.warps_rows])
    column, column_warp, column_part, column_in = sch.split(
        column, [None, tiles.warps_columns, tiles.columns // tiles.warps_columns // ROWS, ROWS]
    )
    n, n_warp, n_part, n_in = sch.split(n, [None, tiles.warps_n, tiles.block_n // tiles.warps_n // ROWS, ROWS])
    k, k_in = sch.split(k, [None, names.k])
    sch.reorder(image, row, column, n, row_warp, column_warp, n_warp, k, row_part, column_part, n_part, column_in, n_in, k_in)
    fragment = sch.blockize(column_in)
    tile = sch.fuse(image, row, column, n)
    warp = sch.fuse(row_warp, column_warp, n_warp)
    sch.bind(tile, "blockIdx.x")
    sch.bind(warp, "threadIdx.y")

    # 3. Operands: weights and the image's part to shared memory, fragments from there.
    weights = sch.cache_read(fragment, gemm.b.position, "shared.dyn")
    sch.compute_at(weights, tile)
    steps = -(-gemm.extents[3] // names.k) * names.k
    step = spread_copy(sch, weights, tiles.warps, math.gcd(gemm.b.vector(), tiles.block_n))
    sch.unroll(step)  # so that only the last steps ask whether they are beyond the weights
    held = sch.cache_read(fragment, gemm.a.position, "local")
    sch.compute_at(held, k)
    held_weights = sch.cache_read(fragment, gemm.b.position, "local")
    sch.compute_at(held_weights, k)
    inline_sources(sch, weights)
    staged = staged_image(sch, held, margin)
    sch.compute_at(staged, tile)
    _copy(sch, staged, tiles.warps)
    sch.transform_layout(held, ("write", 0), placed(gemm.a.dtype))
    spread(sch, held, k, is_paired=False)

    # 4. Sums, and what mma.sync does.
    sums = store_tile(sch, store, (tile, warp), tiles.warps, gemm) if tiles.smem_epilogue else store_sums(sch, store, warp, gemm)
    clear_sums(sch, fragment, sums, k, names, gemm.accum_dtype)
    whole = load_by_matrices(sch, held_weights, gemm.b, names.k, names.load_b)
    keep_apart(sch, weights, whole, tiles.block_n, gemm.b.dtype)
    sch.tensorize(fragment, names.mma)
    if steps // names.k <= UNROLLED_STEPS:
        sch.unroll(k)
    return True


def _copy(sch: Schedule, staged: Any, warps: int) -> None:
    """Spread the image's part over the threads, each row by itself: what a place in a row means is the same in all of them.

    Rows are innermost, so that a thread asks for all of them before it waits for the first, also where only some threads have a place.
    """
    _, row, *places = sch.get_loops(staged)
    step, by_warp, lane = sch.split(sch.fuse(*places), [None, warps, LANES])
    sch.reorder(step, by_warp, lane, row)
    sch.bind(by_warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    for loop in (step, row):
        sch.unroll(loop)
