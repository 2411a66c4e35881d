"""Owns the schedule of matrix products and convolutions on tensor cores: mma.sync, ldmatrix, cp.async, permuted shared memory.

Knows nothing of how its parameters are chosen, and recognises a product by its structure, never by its names.

Parameters:
  block_m, block_n    what one thread block computes
  block_k             steps of the reduction between two barriers
  warps_m, warps_n    how the block's warps divide its tile; a warp's part is made of fragments of 16 x 16
  stages              how many tiles of the operands are in shared memory at once; 1 copies and computes in turn
  raster_group        rows of tiles that are walked before the next column; divides the number of them
  smem_epilogue       1 has a block gather its results in shared memory, from where they are stored in whole rows; 0 has lanes store
  split_k             into which the reduction is cut, to be computed by blocks of their own and added by a second kernel
  double_buffer       1 has a warp load fragments while it multiplies those before, across barriers as well, in twice their registers

Copies are asynchronous where the code is generated with the pass option in PASS_CONFIG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction, Operand, why_no_tensor_cores
from kerneldecl.compiler.intrinsics.mma import LANES, ROWS, MmaIntrinsics
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu.gemm import (
    attempt,
    inline_sources,
    is_async,
    normalize,
    pipeline,
    product_of,
    rasterize,
    sum_parts,
    vector_of,
)
from kerneldecl.templates.gpu.mma_fragments import (
    clear_sums,
    intrinsics_of,
    keep_apart,
    load_by_matrices,
    spread_copy,
    store_sums,
    store_tile,
)

PASS_CONFIG = {"tirx.use_async_copy": 1}


class _Tiles(NamedTuple):
    """The template's parameters, as read."""

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    raster_group: int
    smem_epilogue: int
    split_k: int
    double_buffer: int = 0


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled product with its epilogue fused, or None where tensor cores do not take it."""
    tiles = _Tiles(**{name: value for name, value in params.items() if name in _Tiles._fields})  # type: ignore[arg-type]
    gemm = product_of(mod)
    if gemm is None or why_no_tensor_cores(gemm, arch.the_gpu) or not _fits(tiles, dtype_bytes(gemm.a.dtype), gemm.extents):
        return None
    return attempt(mod, lambda sch: _schedule(sch, gemm, tiles, arch))


def _schedule(sch: Schedule, gemm: Contraction, tiles: _Tiles, arch: Arch) -> bool:
    # 1. Normal form, in whole tiles.
    normal = normalize(sch, gemm, (tiles.block_m, tiles.block_n, tiles.block_k), "local", split_k=tiles.split_k)
    if normal is None:
        return False
    block, store = normal.block, normal.store
    names = intrinsics_of(sch, block, gemm, a_k_last=gemm.a.is_k_last)
    *batch, m, n, k = sch.get_loops(block)

    # 2. Tiles of blocks, warps, fragments.
    m, m_warp, m_part, m_in = sch.split(m, [None, tiles.warps_m, tiles.block_m // tiles.warps_m // ROWS, ROWS])
    n, n_warp, n_part, n_in = sch.split(n, [None, tiles.warps_n, tiles.block_n // tiles.warps_n // ROWS, ROWS])
    k, k_step, k_in = sch.split(k, [None, tiles.block_k // names.k, names.k])
    sch.reorder(*batch, m, n, m_warp, n_warp, k, k_step, m_part, n_part, m_in, n_in, k_in)
    fragment = sch.blockize(m_in)
    tile = rasterize(sch, m, n, tiles.raster_group)
    warp = sch.fuse(m_warp, n_warp)
    sch.bind(tile, "blockIdx.x")
    if batch:
        sch.bind(batch[0], "blockIdx.z")
    sch.bind(warp, "threadIdx.y")

    # 3. Operands: to shared memory by all threads, from there by each warp.
    threads = tiles.warps_m * tiles.warps_n
    asynchronous = arch.the_gpu.async_copy
    shared, held = [], []
    _, m_size, n_size, _ = gemm.extents
    for operand, extent, size in ((gemm.a, tiles.block_m, m_size), (gemm.b, tiles.block_n, n_size)):
        copy = sch.cache_read(fragment, operand.position, "shared.dyn")
        sch.compute_at(copy, k)
        vector = vector_of(operand, extent * tiles.block_k, threads * LANES)
        is_whole = size % extent == 0 and gemm.extents[3] % (tiles.block_k * tiles.split_k) == 0
        if dtype_bytes(operand.dtype) == 1 and not is_whole:
            vector = math.gcd(vector, 4)  # TVM's CUDA has no wider vector of zeros for what lies beyond the operand
        asynchronous = asynchronous and is_async(operand, vector)
        spread_copy(sch, copy, threads, vector)
        shared.append(copy)
    for operand in (gemm.a, gemm.b):
        load = sch.cache_read(fragment, operand.position, "local")
        sch.compute_at(load, k_step)
        held.append(load)
    for copy in shared:
        inline_sources(sch, copy)

    # 4. Sums: in the lanes that mma.sync leaves them in, and from there to the result.
    sums = store_tile(sch, store, (tile, warp), threads, gemm) if tiles.smem_epilogue else store_sums(sch, store, warp, gemm)
    clear_sums(sch, fragment, sums, k, names, gemm.accum_dtype)
    _tensorize(sch, (fragment, *held, *shared), tiles, names, (gemm.a, gemm.b))
    pipeline(sch, k, tiles.stages, asynchronous=asynchronous, within=k_step if tiles.double_buffer else None)
    if normal.whole is not None:
        sum_parts(sch, normal.whole, gemm)
    return True


def _fits(tiles: _Tiles, item_bytes: int, extents: tuple[int, int, int, int]) -> bool:
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


def _tensorize(sch: Schedule, blocks: tuple[Any, ...], tiles: _Tiles, names: MmaIntrinsics, operands: tuple[Operand, Operand]) -> None:
    fragment, *rest = blocks
    for at, (operand, name) in enumerate(zip(operands, (names.load_a, names.load_b), strict=True)):
        load, copy = rest[at], rest[at + 2]
        extent = (tiles.block_m, tiles.block_n)[at]
        whole = load_by_matrices(sch, load, operand, names.k, name)
        length = tiles.block_k if operand.is_k_last else extent
        keep_apart(sch, copy, whole, length, operand.dtype)
    sch.tensorize(fragment, names.mma)
