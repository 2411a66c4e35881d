"""Owns the schedule of GEMMs and convolutions on tensor cores: mma.sync, ldmatrix, cp.async, permuted shared memory.

Knows nothing of how its parameters are chosen, and recognises a GEMM by its structure, never by its mma.

Parameters:
  block_m, block_n    rows and columns of a thread block's tile
  block_k             extent of a k-tile, between two barriers
  warps_m, warps_n    warps along the rows and the columns of the tile; a warp tile consists of fragments of 16 x 16
  stages              k-tiles of both operands in shared memory at once; 1 copies and computes in turn
  raster_group        rows of tiles visited before the next column of tiles; divides the number of rows of tiles
  smem_epilogue       1 stores results through shared memory, in whole rows; 0 has each lane store its own
  split_k             parts of k, computed by thread blocks of their own and added by a second kernel
  double_buffer       1 has a warp load the next fragments while it multiplies the current ones, also across barriers; that takes twice
                      the registers for fragments, three stages, and two k-iterations per k-tile

Copies are asynchronous where code is generated with the pass option in PASS_CONFIG. Operands that the function dequantises before are
computed on their way to shared memory, element by element.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction, Operand, dequantised_operands, why_no_tensor_cores
from kerneldecl.analysis.params import GemmTcParams, read_params
from kerneldecl.compiler.intrinsics.fragment_loads import LANES, ROWS
from kerneldecl.compiler.intrinsics.mma import MmaIntrinsics
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu.gemm import (
    can_copy_async,
    copy_vector,
    inline_sources,
    normalize,
    pipeline,
    rasterize,
    read_gemm,
    reduce_split_k,
    schedule_rest,
)
from kerneldecl.templates.gpu.mma_fragments import (
    Results,
    avoid_bank_conflicts,
    clear_accumulators,
    distribute_copy,
    intrinsics_of,
    load_fragments,
    store_accumulators,
)
from kerneldecl.templates.shared.blocks import attempt

PASS_CONFIG = {"tirx.use_async_copy": 1}


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled GEMM with its epilogue fused, or None where mma.sync or the tile sizes do not take it."""
    tiles = read_params(GemmTcParams, params)
    gemm = read_gemm(mod)
    if gemm is None or why_no_tensor_cores(gemm, arch.the_gpu) or not _fits(tiles, dtype_bytes(gemm.a.dtype), gemm.extents):
        return None
    dequantised = dequantised_operands(iter_space(mod))
    return attempt(mod, lambda sch: _schedule(sch, gemm, tiles, arch, dequantised))


def _schedule(sch: Schedule, gemm: Contraction, tiles: GemmTcParams, arch: Arch, dequantised: frozenset[int]) -> bool:
    # 1. Normal form, in whole tiles.
    normal = normalize(sch, gemm, (tiles.block_m, tiles.block_n, tiles.block_k), split_k=tiles.split_k)
    if normal is None:
        return False
    block, store = normal.block, normal.store
    mma = intrinsics_of(sch, block, gemm, arch.the_gpu, a_k_last=gemm.a.is_k_last)
    *batch, m, n, k = sch.get_loops(block)

    # 2. Tiles of blocks, of warps, fragments.
    m, m_warp, m_fragment, m_in = sch.split(m, [None, tiles.warps_m, tiles.block_m // tiles.warps_m // ROWS, ROWS])
    n, n_warp, n_fragment, n_in = sch.split(n, [None, tiles.warps_n, tiles.block_n // tiles.warps_n // ROWS, ROWS])
    k, k_step, k_in = sch.split(k, [None, tiles.block_k // mma.k, mma.k])
    sch.reorder(*batch, m, n, m_warp, n_warp, k, k_step, m_fragment, n_fragment, m_in, n_in, k_in)
    fragment = sch.blockize(m_in)
    tile = rasterize(sch, m, n, tiles.raster_group)
    warp = sch.fuse(m_warp, n_warp)
    sch.bind(tile, "blockIdx.x")
    if batch:
        sch.bind(batch[0], "blockIdx.z")
    sch.bind(warp, "threadIdx.y")

    # 3. Operands: to shared memory by all threads, from there to registers by each warp.
    asynchronous = arch.the_gpu.async_copy
    copies, loads = [], []
    _, m_size, n_size, _ = gemm.extents
    for operand, extent, size in ((gemm.a, tiles.block_m, m_size), (gemm.b, tiles.block_n, n_size)):
        copy = sch.cache_read(fragment, operand.position, "shared.dyn")
        sch.compute_at(copy, k)
        vector = copy_vector(operand, extent * tiles.block_k, tiles.warps * LANES)
        is_whole = size % extent == 0 and gemm.extents[3] % (tiles.block_k * tiles.split_k) == 0
        is_image = operand is gemm.a and len(gemm.k) > 1  # which may be padded
        if dtype_bytes(operand.dtype) == 1 and (is_image or not is_whole):
            vector = math.gcd(vector, 4)  # TVM's CUDA has no wider vector of zeros, for elements beyond the operand
        is_computed = operand.position in dequantised
        asynchronous = asynchronous and can_copy_async(operand, vector) and not is_computed
        distribute_copy(sch, copy, tiles.warps, vector, is_computed=is_computed)
        copies.append(copy)
    for operand in (gemm.a, gemm.b):
        load = sch.cache_read(fragment, operand.position, "local")
        sch.compute_at(load, k_step)
        loads.append(load)
    for copy in copies:
        inline_sources(sch, copy)

    # 4. Accumulators: in the lanes where mma.sync leaves them, and from there to the result.
    accum = store_accumulators(sch, store, (tile, warp), tiles, Results(gemm, mma.interleaved))
    clear_accumulators(sch, fragment, accum, k, mma)
    _tensorize(sch, (fragment, *loads, *copies), tiles, mma, (gemm.a, gemm.b))
    pipeline(sch, k, tiles.stages, asynchronous=asynchronous, within=k_step if tiles.double_buffer else None)
    if normal.split_k is not None:
        reduce_split_k(sch, normal.split_k, gemm)
    schedule_rest(sch, normal.rest)
    return True


def _fits(tiles: GemmTcParams, item_bytes: int, extents: tuple[int, int, int, int]) -> bool:
    _, m, _, k = extents
    rows = -(-m // tiles.block_m)
    return (
        tiles.block_m % (ROWS * tiles.warps_m) == 0
        and tiles.block_n % (ROWS * tiles.warps_n) == 0
        and tiles.block_k % (32 // item_bytes) == 0
        and rows % tiles.raster_group == 0
        and -(-k // (tiles.block_k * tiles.split_k)) >= tiles.stages - 1
        and (not tiles.double_buffer or (tiles.stages >= 3 and tiles.block_k % (64 // item_bytes) == 0))
    )


def _tensorize(sch: Schedule, blocks: tuple[Any, ...], tiles: GemmTcParams, mma: MmaIntrinsics, operands: tuple[Operand, Operand]) -> None:
    fragment, *rest = blocks
    for at, (operand, intrinsic) in enumerate(zip(operands, (mma.load_a, mma.load_b), strict=True)):
        load, copy = rest[at], rest[at + 2]
        extent = (tiles.block_m, tiles.block_n)[at]
        loaded = load_fragments(sch, load, operand, mma.k, intrinsic)
        length = tiles.block_k if operand.is_k_last else extent
        avoid_bank_conflicts(sch, copy, loaded, length, operand.dtype)
    sch.tensorize(fragment, mma.mma)
