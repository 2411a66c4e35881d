"""Owns the schedule of GEMMs and convolutions on CUDA cores: register tiles fed from shared memory.

Knows nothing of how its parameters are chosen, and recognises a GEMM by its structure, never by its names.

Parameters:
  block_m, block_n    rows and columns of a thread block's tile
  block_k             extent of a k-tile, between two barriers
  thread_m, thread_n  rows and columns of a thread's register tile: vectors of up to 4 of each, distributed over the block's tile
  stages              1 copies and computes in turn; 2 holds the next k-tiles in registers while it computes; more are the k-tiles of both
                      operands in shared memory at once, copied by cp.async
  raster_group        rows of tiles visited before the next column of tiles; divides the number of rows of tiles
  split_k             parts of k, computed by thread blocks of their own and added by a second kernel
  vector_n            neighbouring columns of a thread, 1, 2 or 4 (where it is left out); with 1, lanes store neighbouring results at once,
                      which pays where rows of the result are no whole vectors

Copies by cp.async are asynchronous where code is generated with the pass option in PASS_CONFIG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction, Operand
from kerneldecl.analysis.params import SIMT_VECTOR, SIMT_WARP_COLUMNS, SIMT_WARP_ROWS, GemmSimtParams, read_params
from kerneldecl.analysis.unpacked_operands import scalar_operands
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu.gemm import (
    can_copy_async,
    copy_vector,
    inline_sources,
    interleave_lanes,
    normalize,
    pipeline,
    place_store,
    rasterize,
    read_gemm,
    reduce_split_k,
    schedule_rest,
)
from kerneldecl.templates.shared.blocks import attempt

PASS_CONFIG = {"tirx.use_async_copy": 1}
BANKS = 32
"""Banks of shared memory, each 4 bytes wide."""
UNROLLED_K = 8
"""K-iterations that are unrolled: unrolling a whole k-tile takes nvcc many seconds."""


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled GEMM with its epilogue fused, or None where the function is no GEMM or the tile sizes do not suit it."""
    tiles = read_params(GemmSimtParams, params)
    gemm = read_gemm(mod)
    if gemm is None or not _fits(tiles, gemm.extents):
        return None
    unpacked = scalar_operands(iter_space(mod))
    return attempt(mod, lambda sch: _schedule(sch, gemm, tiles, arch, unpacked))


def _schedule(sch: Schedule, gemm: Contraction, tiles: GemmSimtParams, arch: Arch, unpacked: frozenset[int]) -> bool:
    vector_m, vector_n = math.gcd(tiles.thread_m, SIMT_VECTOR), math.gcd(tiles.thread_n, tiles.vector_n)
    # 1. Normal form, in whole tiles; both operands have k first, so that a thread's rows (columns) are adjacent.
    normal = normalize(sch, gemm, (tiles.block_m, tiles.block_n, tiles.block_k), k_first=True, split_k=tiles.split_k)
    if normal is None:
        return False
    block, store = normal.block, normal.store
    *batch, m, n, k = sch.get_loops(block)

    # 2. Tiles of blocks, vectors distributed over the tile, warps, lanes.
    m, m_vectors, m_warp, m_lane, m_in = _split(sch, m, tiles.block_m, tiles.thread_m, (vector_m, SIMT_WARP_ROWS))
    n, n_vectors, n_warp, n_lane, n_in = _split(sch, n, tiles.block_n, tiles.thread_n, (vector_n, SIMT_WARP_COLUMNS))
    k, k_out, k_in = sch.split(k, [None, tiles.block_k // UNROLLED_K, UNROLLED_K])
    sch.reorder(*batch, m, n, m_vectors, n_vectors, m_warp, n_warp, m_lane, n_lane, k, k_out, k_in, m_in, n_in)
    tile = rasterize(sch, m, n, tiles.raster_group)
    thread = sch.fuse(m_warp, n_warp, *interleave_lanes(sch, m_lane, n_lane))
    sch.bind(tile, "blockIdx.x")
    if batch:
        sch.bind(batch[0], "blockIdx.z")
    # A thread's vectors are strided; as virtual threads, each has small arrays of its own, which nvcc keeps in registers.
    sch.bind(m_vectors, "vthread.y")
    sch.bind(n_vectors, "vthread.x")
    sch.bind(thread, "threadIdx.x")

    # 3. Operands: to shared memory by all threads, from there to each thread's registers.
    stages = _stages(gemm, tiles, arch)
    copies = [_copy(sch, block, k, operand, tiles, is_unpacked=operand.position in unpacked) for operand in (gemm.a, gemm.b)]
    for operand, vector in ((gemm.a, vector_m), (gemm.b, vector_n)):
        _load(sch, block, k_in, operand, vector)
    for copy in copies:
        inline_sources(sch, copy)

    # 4. Accumulators: cleared before the k-loop, stored after it, through the epilogue.
    _store(sch, store, thread, vector_n if gemm.out_contiguous % vector_n == 0 else 1, is_single=vector_n == 1)
    for loop in (m_in, n_in, k_in):
        sch.unroll(loop)
    sch.decompose_reduction(block, k)
    if stages == 2:
        # Both copies load their next tiles into registers, the block computes, both copies write to shared memory.
        sch.annotate(k, "software_pipeline_stage", [0, 0, 0, 0, 1])
        sch.annotate(k, "software_pipeline_order", [0, 3, 1, 4, 2])
    else:
        pipeline(sch, k, stages, asynchronous=True)
    if normal.split_k is not None:
        reduce_split_k(sch, normal.split_k, gemm)
    schedule_rest(sch, normal.rest)
    return True


def _fits(tiles: GemmSimtParams, extents: tuple[int, int, int, int]) -> bool:
    _, m, _, k = extents
    return (
        tiles.block_m % (tiles.thread_m * SIMT_WARP_ROWS) == 0
        and tiles.block_k % UNROLLED_K == 0
        and tiles.block_n % (tiles.thread_n * SIMT_WARP_COLUMNS) == 0
        and -(-m // tiles.block_m) % tiles.raster_group == 0
        and -(-k // (tiles.block_k * tiles.split_k)) >= tiles.stages
    )


def _split(sch: Schedule, loop: Any, block: int, thread: int, inner: tuple[int, int]) -> list[Any]:
    """Split a loop into tiles, a thread's vectors, warps, lanes and the elements of a vector."""
    vector, lanes = inner
    return list(sch.split(loop, [None, thread // vector, block // thread // lanes, lanes, vector]))


def _stages(gemm: Contraction, tiles: GemmSimtParams, arch: Arch) -> int:
    """Return the stages of the pipeline: as given where cp.async can copy, or through registers with 2; else 1."""
    operands = ((gemm.a, tiles.block_m), (gemm.b, tiles.block_n))
    is_async = arch.the_gpu.async_copy and all(can_copy_async(operand, _vector(operand, extent, tiles)) for operand, extent in operands)
    return tiles.stages if is_async or tiles.stages == 2 else 1


def _vector(operand: Operand, extent: int, tiles: GemmSimtParams) -> int:
    """Return the elements per copy instruction. Elements along k go to different rows of shared memory, which only copies through
    registers can do.
    """
    if operand.is_k_last and (tiles.stages != 2 or operand.dtype.startswith("float8")):
        return 1  # CUDA's vectors of float8 have no members to store one by one
    vector = copy_vector(operand, extent * tiles.block_k, tiles.threads)
    # TVM's CUDA has no vector of more than four 8-bit zeros, for elements beyond the operand.
    return math.gcd(vector, 4 if dtype_bytes(operand.dtype) == 1 else tiles.block_k if operand.is_k_last else vector)


def _copy(sch: Schedule, block: Any, k_loop: Any, operand: Operand, tiles: GemmSimtParams, *, is_unpacked: bool) -> Any:
    """Have all threads copy an operand's k-tile to shared memory, adjacent threads adjacent elements of global memory.

    A thread computes unpacked elements of a vector one by one: TVM's CUDA has no vector of one shift of bytes that is no constant.
    """
    copy = sch.cache_read(block, operand.position, "shared.dyn")
    sch.compute_at(copy, k_loop, preserve_unit_loops=tiles.vector_n == 1)
    k, other = sch.get_loops(copy)[-2:]
    vector = _vector(operand, int(sch.get(other).extent), tiles)
    loops = [k, other]
    if operand.is_k_last:
        # Adjacent threads along k write to different rows: rows padded by 16 bytes put eight of them in different banks.
        sch.storage_align(copy, 0, axis=-2, factor=BANKS, offset=16 // dtype_bytes(operand.dtype))
        k, k_in = sch.split(k, [None, UNROLLED_K])
        loops = [k, other, k_in]
        sch.reorder(*loops)
    _, thread, element = sch.split(sch.fuse(*loops), [None, tiles.threads, vector])
    sch.bind(thread, "threadIdx.x")
    if vector == 1 or not is_unpacked:
        sch.vectorize(element)
    if tiles.stages == 2:
        sch.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    return copy


def _store(sch: Schedule, store: Any, thread: Any, vector: int, *, is_single: bool) -> None:
    """Have each thread store its results, in vectors where rows of the result allow them; `is_single` says that it has single columns."""
    place_store(sch, store, thread, keeps_unit_loops=is_single)
    row, column = sch.get_loops(store)[-2:]
    _, column_in = sch.split(column, [None, vector])
    sch.unroll(row)
    sch.vectorize(column_in)


def _load(sch: Schedule, block: Any, k_loop: Any, operand: Operand, vector: int) -> None:
    """Load an operand's elements of one k-iteration from shared memory into registers.

    Where the copy writes vectors as well, TVM would turn the shared buffer into one of vectors, which cp.async cannot write;
    nvcc itself combines adjacent loads into vectors.
    """
    load = sch.cache_read(block, operand.position, "local")
    sch.compute_at(load, k_loop, preserve_unit_loops=vector == 1)
    _, inner = sch.split(sch.get_loops(load)[-1], [None, vector])
    if operand.is_k_last:
        sch.vectorize(inner)
    else:
        sch.unroll(inner)
