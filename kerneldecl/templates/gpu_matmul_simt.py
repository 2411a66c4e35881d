"""Owns the schedule of matrix products and convolutions on CUDA cores: tiles of registers fed from shared memory.

Knows nothing of how its parameters are chosen, and recognises a product by its structure, never by its names.

Parameters:
  block_m, block_n    what one thread block computes
  block_k             steps of the reduction between two barriers
  thread_m, thread_n  what one thread computes: vectors of up to 4 rows and columns, spread over the block's tile
  stages              1 copies and computes in turn; 2 has the next tiles wait in registers while it computes; more is how many
                      tiles of the operands are in shared memory at once, copied by cp.async
  raster_group        rows of tiles that are walked before the next column; divides the number of them
  split_k             into which the reduction is cut, to be computed by blocks of their own and added by a second kernel

Copies by cp.async are asynchronous where the code is generated with the pass option in PASS_CONFIG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from tvm import IRModule
from tvm.s_tir import Schedule

from kerneldecl.analysis.contraction import Contraction, Operand
from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates.gpu.gemm import (
    attempt,
    inline_sources,
    interleaved,
    is_async,
    normalize,
    pipeline,
    place_store,
    product_of,
    rasterize,
    sum_parts,
    vector_of,
)

PASS_CONFIG = {"tirx.use_async_copy": 1}
WARP_ROWS, WARP_COLUMNS = 4, 8
"""How the lanes of a warp are laid out over its tile: of each operand they read few elements, which are broadcast."""
BANKS = 32
UNROLLED_STEPS = 8


class _Tiles(NamedTuple):
    """The template's parameters, as read."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    stages: int
    raster_group: int
    split_k: int

    @property
    def threads(self) -> int:
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> Schedule | None:
    """Return the scheduled product with its epilogue fused, or None where the function is no product."""
    tiles = _Tiles(**{name: params[name] for name in _Tiles._fields})  # type: ignore[arg-type]
    gemm = product_of(mod)
    if gemm is None or not _fits(tiles, gemm.extents):
        return None

    return attempt(mod, lambda sch: _schedule(sch, gemm, tiles, arch))


def _schedule(sch: Schedule, gemm: Contraction, tiles: _Tiles, arch: Arch) -> bool:
    vector_m, vector_n = math.gcd(tiles.thread_m, 4), math.gcd(tiles.thread_n, 4)
    # 1. Normal form, in whole tiles; both operands have k first, so that a thread's rows (columns) are neighbours.
    normal = normalize(sch, gemm, (tiles.block_m, tiles.block_n, tiles.block_k), "local", k_first=True, split_k=tiles.split_k)
    if normal is None:
        return False
    block, store = normal.block, normal.store
    *batch, m, n, k = sch.get_loops(block)

    # 2. Tiles of blocks, vectors spread over the tile, warps, lanes.
    m, m_vectors, m_warp, m_lane, m_in = _cut(sch, m, tiles.block_m, tiles.thread_m, (vector_m, WARP_ROWS))
    n, n_vectors, n_warp, n_lane, n_in = _cut(sch, n, tiles.block_n, tiles.thread_n, (vector_n, WARP_COLUMNS))
    # Of longer steps, a part is spelt out: all of them take nvcc many seconds.
    k, k_out, k_in = sch.split(k, [None, tiles.block_k // UNROLLED_STEPS, UNROLLED_STEPS])
    sch.reorder(*batch, m, n, m_vectors, n_vectors, m_warp, n_warp, m_lane, n_lane, k, k_out, k_in, m_in, n_in)
    tile = rasterize(sch, m, n, tiles.raster_group)
    thread = sch.fuse(m_warp, n_warp, *interleaved(sch, m_lane, n_lane))
    sch.bind(tile, "blockIdx.x")
    if batch:
        sch.bind(batch[0], "blockIdx.z")
    # Vectors of one thread lie apart; as virtual threads, each has its own small arrays, which become registers.
    sch.bind(m_vectors, "vthread.y")
    sch.bind(n_vectors, "vthread.x")
    sch.bind(thread, "threadIdx.x")

    # 3. Operands: to shared memory by all threads, from there to each thread's registers.
    stages = _stages(gemm, tiles, arch)
    copies = [_copy(sch, block, k, operand, tiles) for operand in (gemm.a, gemm.b)]
    for operand, vector in ((gemm.a, vector_m), (gemm.b, vector_n)):
        _load(sch, block, k_in, operand, vector)
    for copy in copies:
        inline_sources(sch, copy)

    # 4. Sums: cleared before, stored after, through the epilogue.
    _store(sch, store, thread, vector_n if gemm.out_contiguous % vector_n == 0 else 1)
    for loop in (m_in, n_in, k_in):
        sch.unroll(loop)
    sch.decompose_reduction(block, k)
    if stages == 2:
        # Both copies take their next tiles to registers, the product is computed, both copies write to shared memory.
        sch.annotate(k, "software_pipeline_stage", [0, 0, 0, 0, 1])
        sch.annotate(k, "software_pipeline_order", [0, 3, 1, 4, 2])
    else:
        pipeline(sch, k, stages, asynchronous=True)
    if normal.whole is not None:
        sum_parts(sch, normal.whole, gemm)
    return True


def _fits(tiles: _Tiles, extents: tuple[int, int, int, int]) -> bool:
    _, m, _, k = extents
    return (
        tiles.block_m % (tiles.thread_m * WARP_ROWS) == 0
        and tiles.block_k % UNROLLED_STEPS == 0
        and tiles.block_n % (tiles.thread_n * WARP_COLUMNS) == 0
        and -(-m // tiles.block_m) % tiles.raster_group == 0
        and -(-k // (tiles.block_k * tiles.split_k)) >= tiles.stages
    )


def _cut(sch: Schedule, loop: Any, block: int, thread: int, inner: tuple[int, int]) -> list[Any]:
    """Cut a loop into tiles, a thread's vectors, warps, lanes and the elements of a vector."""
    vector, lanes = inner
    return list(sch.split(loop, [None, thread // vector, block // thread // lanes, lanes, vector]))


def _stages(gemm: Contraction, tiles: _Tiles, arch: Arch) -> int:
    """Return how far ahead to copy: more than one tile where cp.async can, else none."""
    operands = ((gemm.a, tiles.block_m), (gemm.b, tiles.block_n))
    can = arch.the_gpu.async_copy and all(is_async(operand, _vector(operand, extent, tiles)) for operand, extent in operands)
    return tiles.stages if can or tiles.stages == 2 else 1


def _vector(operand: Operand, extent: int, tiles: _Tiles) -> int:
    """Return how many elements are copied at once: in registers, those along k are spread over rows of shared memory."""
    if tiles.stages != 2 and operand.is_k_last:
        return 1
    vector = vector_of(operand, extent * tiles.block_k, tiles.threads)
    # TVM's CUDA has no vector of more than four 8-bit zeros for what lies beyond the operand.
    return math.gcd(vector, 4 if dtype_bytes(operand.dtype) == 1 else tiles.block_k if operand.is_k_last else vector)


def _copy(sch: Schedule, block: Any, step: Any, operand: Operand, tiles: _Tiles) -> Any:
    """Have all threads copy an operand's tile to shared memory, neighbours in global memory by neighbouring threads."""
    copy = sch.cache_read(block, operand.position, "shared.dyn")
    sch.compute_at(copy, step)
    k, other = sch.get_loops(copy)[-2:]
    vector = _vector(operand, int(sch.get(other).extent), tiles)
    loops = [k, other]
    if operand.is_k_last:
        # Threads that are neighbours along k write to different rows: rows that end 16 bytes past all banks keep 8 apart.
        sch.storage_align(copy, 0, axis=-2, factor=BANKS, offset=16 // dtype_bytes(operand.dtype))
        k, k_in = sch.split(k, [None, UNROLLED_STEPS])
        loops = [k, other, k_in]
        sch.reorder(*loops)
    flat = sch.fuse(*loops)
    _, thread, element = sch.split(flat, [None, tiles.threads, vector])
    sch.bind(thread, "threadIdx.x")
    sch.vectorize(element)
    if tiles.stages == 2:
        sch.annotate(copy, "tirx.manifest_shared_memory_local_stage", 1)
    return copy


def _store(sch: Schedule, store: Any, thread: Any, vector: int) -> None:
    """Have each thread store its results, in vectors where rows of the result allow them."""
    place_store(sch, store, thread)
    row, column = sch.get_loops(store)[-2:]
    _, column_in = sch.split(column, [None, vector])
    sch.unroll(row)
    sch.vectorize(column_in)


def _load(sch: Schedule, block: Any, step: Any, operand: Operand, vector: int) -> None:
    """Take what one step needs of an operand from shared memory into registers.

    Where a copy writes vectors as well, TVM would make the shared buffer one of vectors, which cp.async cannot write;
    nvcc makes vectors of neighbouring loads by itself.
    """
    load = sch.cache_read(block, operand.position, "local")
    sch.compute_at(load, step)
    _, inner = sch.split(sch.get_loops(load)[-1], [None, vector])
    if operand.is_k_last:
        sch.vectorize(inner)
    else:
        sch.unroll(inner)
