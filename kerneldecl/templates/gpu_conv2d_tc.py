"""Owns the schedule of direct convolutions on tensor cores: a thread block keeps its receptive field in shared memory once.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its mma.

As an implicit GEMM, as gpu_matmul_tc computes it, a convolution copies each pixel once for every sliding window that contains it, and where
channels are few, element by element. Here lanes load the elements of their fragments from the receptive field itself; all of a block's
weights are in shared memory.

Parameters:
  rows, columns       rows and columns of a thread block's rectangle of output pixels
  block_n             output channels of a thread block
  warps_rows, warps_columns, warps_n    warps along the rows, the columns (at least 16 for each) and the channels of the block
  smem_epilogue       1 stores results through shared memory, in whole rows; 0 has each lane store its own
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction, why_no_tensor_cores
from kerneldecl.analysis.params import CONV_TC_MAX_K_TILES, ConvTcParams, read_params
from kerneldecl.compiler.intrinsics.fragment_loads import LANES, ROWS
from kerneldecl.model import Arch, Gpu, Value, dtype_bytes
from kerneldecl.templates.gpu.conv import normalize_conv, receptive_field
from kerneldecl.templates.gpu.gemm import inline_sources, read_gemm
from kerneldecl.templates.gpu.mma_fragments import (
    Results,
    avoid_bank_conflicts,
    clear_accumulators,
    distribute_copy,
    distribute_fragments,
    intrinsics_of,
    load_fragments,
    operand_layout,
    store_accumulators,
)
from kerneldecl.templates.shared.blocks import attempt
from kerneldecl.templates.shared.contraction import fuse_epilogue


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled convolution with its epilogue fused, or None where mma.sync or the tile sizes do not take it."""
    tiles = read_params(ConvTcParams, params)
    gemm = read_gemm(mod)
    if gemm is None or why_no_tensor_cores(gemm, arch.the_gpu) or not _fits(tiles, gemm):
        return None
    return attempt(mod, lambda sch: _schedule(sch, gemm, tiles, arch.the_gpu))


def _fits(tiles: ConvTcParams, gemm: Contraction) -> bool:
    return (
        not gemm.batch
        and len(gemm.m) == 3
        and len(gemm.k) > 1
        and dtype_bytes(gemm.a.dtype) == 2
        and tiles.rows % tiles.warps_rows == 0
        and tiles.columns % (ROWS * tiles.warps_columns) == 0
        and tiles.block_n % (ROWS * tiles.warps_n) == 0
    )


def _schedule(sch: Schedule, gemm: Contraction, tiles: ConvTcParams, gpu: Gpu) -> bool:
    # 1. Normal form: image, row, column and channel of the output, and one fused reduction axis; in whole tiles.
    fused = fuse_epilogue(sch)
    if fused is None:
        return False
    block = fused.block
    padding = sch.get_producers(block)
    normalize_conv(sch, block, gemm, [gemm.k])
    mma = intrinsics_of(sch, block, gemm, gpu, a_k_last=True)
    sch.pad_einsum(block, [1, tiles.rows, tiles.columns, tiles.block_n, mma.k])
    store = sch.cache_write(block, 0, "local")

    # 2. Tiles of blocks, of warps, fragments.
    image, row, column, n, k = sch.get_loops(block)
    row, row_warp, row_tile = sch.split(row, [None, tiles.warps_rows, tiles.rows // tiles.warps_rows])
    column, column_warp, column_fragment, column_in = sch.split(
        column, [None, tiles.warps_columns, tiles.columns // tiles.warps_columns // ROWS, ROWS]
    )
    n, n_warp, n_fragment, n_in = sch.split(n, [None, tiles.warps_n, tiles.block_n // tiles.warps_n // ROWS, ROWS])
    k, k_in = sch.split(k, [None, mma.k])
    sch.reorder(image, row, column, n, row_warp, column_warp, n_warp, k, row_tile, column_fragment, n_fragment, column_in, n_in, k_in)
    fragment = sch.blockize(column_in)
    tile = sch.fuse(image, row, column, n)
    warp = sch.fuse(row_warp, column_warp, n_warp)
    sch.bind(tile, "blockIdx.x")
    sch.bind(warp, "threadIdx.y")

    # 3. Operands: weights and receptive field to shared memory, fragments from there.
    weights = sch.cache_read(fragment, gemm.b.position, "shared.dyn")
    sch.compute_at(weights, tile)
    iteration = distribute_copy(sch, weights, tiles.warps, math.gcd(gemm.b.vector(), tiles.block_n))
    sch.unroll(iteration)  # so that only the last iterations check the bounds of the weights
    load = sch.cache_read(fragment, gemm.a.position, "local")
    sch.compute_at(load, k)
    load_weights = sch.cache_read(fragment, gemm.b.position, "local")
    sch.compute_at(load_weights, k)
    inline_sources(sch, weights)
    field = receptive_field(sch, load, padding)
    sch.compute_at(field, tile)
    _copy(sch, field, tiles.warps)
    sch.transform_layout(load, ("write", 0), operand_layout(gemm.a.dtype, ROWS, mma.k, k_last=True))
    distribute_fragments(sch, load, k, vectorize=False)

    # 4. Accumulators, and the fragments that mma.sync multiplies.
    accum = store_accumulators(sch, store, (tile, warp), tiles, Results(gemm, mma.interleaved))
    clear_accumulators(sch, fragment, accum, k, mma)
    loaded = load_fragments(sch, load_weights, gemm.b, mma.k, mma.load_b)
    avoid_bank_conflicts(sch, weights, loaded, tiles.block_n, gemm.b.dtype)
    sch.tensorize(fragment, mma.mma)
    if -(-gemm.extents[3] // mma.k) <= CONV_TC_MAX_K_TILES:
        sch.unroll(k)
    return True


def _copy(sch: Schedule, field: Any, warps: int) -> None:
    """Distribute the elements of a row of the receptive field over the threads, in all rows alike.

    Rows are innermost, so that a thread's loads of all rows are in flight together, also where only some threads have an element.
    """
    _, row, *elements = sch.get_loops(field)
    iteration, by_warp, lane = sch.split(sch.fuse(*elements), [None, warps, LANES])
    sch.reorder(iteration, by_warp, lane, row)
    sch.bind(by_warp, "threadIdx.y")
    sch.bind(lane, "threadIdx.x")
    for loop in (iteration, row):
        sch.unroll(loop)
