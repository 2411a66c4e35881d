"""Owns which tiles and pipelines of a GEMM on CUDA cores a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from kerneldecl.analysis.contraction import Contraction, Operand, contraction_of
from kerneldecl.analysis.gpu_limits import MAX_GRID_Z, MIN_ASYNC_COPY_BYTES, SM_PARTITIONS
from kerneldecl.analysis.params import SIMT_VECTOR, SIMT_WARP_COLUMNS, SIMT_WARP_ROWS, GemmSimtParams
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu import conv_tiles_simt
from kerneldecl.policies.gpu.conv_tiles import sliding_window_of
from kerneldecl.policies.gpu.gemm_tiles import (
    Estimate,
    best_first,
    block_extents,
    dram_bytes,
    interleaved,
    raster_group_of,
    split_k_choices,
)
from kerneldecl.policies.gpu.time_model import FAST_MATH_BYTES, SMEM_LOAD_CYCLES, launch_secs, occupancy, warp_fma_cycles

TEMPLATES = ("gpu_matmul_simt", "gpu_conv2d_simt")
AUTO = {"cuda": 50}

BLOCKS_M = (16, 32, 64, 128, 256)
BLOCKS_N = (32, 64, 128, 256)
BLOCK_K = 8
"""K of a k-tile. Longer k-tiles were slower wherever they were measured: they compute an address for each element that they copy."""
THREAD_TILES = ((4, 4), (4, 8), (8, 4), (8, 8))
FEW_ROWS, FEW_ROWS_THREAD_TILES = 8, ((2, 4), (2, 8))
"""Rows of the smallest tile, which is tried besides where there are no more, and tiles of its threads."""
EXACT_FROM = 1.15
"""Columns of the usual tiles, as a multiple of those that there are, from which a tile of all of them is tried."""
EXACT_WARPS, EXACT_THREAD_N = (1, 2, 3, 4), (1, 2, 3, 5, 6, 7, 9, 10)
"""Warps along the columns of such a tile, and columns of a thread: with more, accumulators of eight rows leave nvcc too few registers."""
FEW_COLUMNS = 16
"""Columns of a tile up to which a thread has less than three of them."""
THREADS = range(32, 513)
STAGES = (2, 4)
FEW_BLOCKS_STAGES = 8
"""Stages that are tried besides where SMs have one small thread block at most, which waits for each copy."""
MIN_K_TILES = 8
"""K-tiles of a thread block at least, where split-K divides the reduction."""
SPLIT_K_MARGIN = 2.0
"""Ratio of the least times with split-K and without, up to which both are tried: the model knows the second kernel by few measurements."""
SAME_TILE = 4
"""Candidates of one tile that are proposed."""
OTHER_REGISTERS = 24
"""Registers of a thread besides accumulators, operands of two values of k and its part of the next k-tile, as nvcc gives for sm_90."""
MAX_REGISTERS = 128
"""Registers that nvcc gives at most to a thread whose tile is in THREAD_TILES; to one of more accumulators as many as they are more."""
MOST_ACCUMULATORS = 64
"""Accumulators of a thread whose tile is the largest in THREAD_TILES."""

# Cycles of a thread's scheduler, fitted to the times of 320 kernels on an H200.
ADDRESS_CYCLES = 4.0
"""Cycles of the address of one access to global memory; four times as many where elements are strided."""
ASYNC_ELEMENT_CYCLES, ASYNC_VECTOR_CYCLES, ASYNC_STRIDED_CYCLES = 10.0, 1.0, 22.0
"""Cycles of a copy by cp.async: of 4 bytes, which go to shared memory across rows; of 16 bytes; and of 4 bytes where elements are strided,
as those of a convolution's sliding windows are, each with bounds of its own."""
LOAD_CYCLES, STORE_CYCLES = 7.0, 2.5
"""Cycles of a load to registers, and of a store from there to shared memory."""
K_TILE_CYCLES = 12.0
"""Cycles of the barriers and the loop of one k-tile."""
BARRIER_CYCLES, STORE_BARRIER_CYCLES = 50.0, 350.0
"""Cycles that a block waits at its barriers in each k-tile, and where its threads store to shared memory in between; other blocks on the
SM use the time."""
LATENCY_SECS = 6e-7
"""Seconds from the first copy of a k-tile until it is in shared memory."""
START_CYCLES = 1500.0
"""Cycles of a block's first k-tiles. START_CYCLES and STORED_BYTES_PER_CYCLE are fitted to 548 kernels of 28 GEMMs on an H200."""
STORED_BYTES_PER_CYCLE = 12.0
"""Bytes of results that an SM stores in a cycle."""
EXPOSED_ENDS = 2.0
"""Part of a block's stores and of the next one's start that come on top between two turns of an SM with one block, where nothing is
multiplied meanwhile; several blocks share that. Tilings of 728 x 10687 x 113 with one, two and four to eight blocks on an
SM took 1.22, 1.1 and 0.98 of what was predicted without (H200, 2026-11)."""
ACTIVATION_CYCLES = 190.0
"""Cycles of a thread for an activation of a result that nvcc compiles without fast math: each division tests for a slow path, and none
begins before the one before it. 52 x 14344 x 40 with silu in tiles of 16, 32 and 64 results a thread (H200, 2026-11)."""
PARTS_IN_FLIGHT = 48
"""Parts of split-K that a thread of the kernel which adds them up loads at once, as nvcc 13.0 orders them: it gives 51 registers for 43
parts, 62 or 63 for 57 to 512."""
DEPENDENCY_STALL = 0.3
"""Fraction of a warp's instructions that it waits for its own earlier ones when its scheduler has no other warp; half of it with two."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what is no GEMM."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or gemm.extents[0] > MAX_GRID_Z:
        return ()
    gpu = arch.the_gpu
    window = sliding_window_of(space, gemm)
    activation = ACTIVATION_CYCLES if _activates_exactly(space) else 0.0
    found = [_estimate(gemm, tiling, gpu, activation) for tiling in tilings(gemm, gpu)]
    found += conv_tiles_simt.estimates(window, gemm, gpu) if window else ()
    return tuple(itertools.islice(_in_order(found), top_k))


def _in_order(found: Sequence[Estimate]) -> Iterator[Proposal]:
    """Yield proposals, the fastest first; where split-K and one kernel are about as fast, those of the slower in every fourth place."""
    kinds = [[each for each in found if (getattr(each.tiling, "split_k", 1) > 1) == is_split] for is_split in (False, True)]
    (best, fastest), (next_best, other) = sorted((min((each.secs for each in kind), default=math.inf), kind) for kind in kinds)
    if next_best <= SPLIT_K_MARGIN * best:
        return interleaved(best_first(fastest, SAME_TILE), best_first(other, SAME_TILE))
    return best_first(found, SAME_TILE)


def tilings(gemm: Contraction, gpu: Gpu) -> Iterator[GemmSimtParams]:
    """Yield the search space: tiles that whole warps divide, with the most stages that fit shared memory."""
    _, m, n, _ = gemm.extents
    usual = itertools.product(block_extents(n, BLOCKS_N), THREAD_TILES)
    tiles = itertools.product(block_extents(m, BLOCKS_M), (*usual, *_exact_columns(n)))
    low = itertools.product((FEW_ROWS,), itertools.product(block_extents(n, BLOCKS_N), FEW_ROWS_THREAD_TILES)) if m <= FEW_ROWS else ()
    for block_m, (block_n, (thread_m, thread_n)) in (*tiles, *low):
        bare = GemmSimtParams(block_m=block_m, block_n=block_n, block_k=BLOCK_K, thread_m=thread_m, thread_n=thread_n, stages=1)
        if block_m % (thread_m * SIMT_WARP_ROWS) or block_n % (thread_n * SIMT_WARP_COLUMNS) or bare.threads not in THREADS:
            continue
        rows, columns = -(-m // block_m), -(-n // block_n)
        resident = max(1, occupancy(gpu, bare.threads, registers(bare, gpu), smem_bytes(gemm, bare)))
        raster_group = raster_group_of(rows, columns, resident * gpu.sm_count, block_m, block_n)
        for split_k in split_k_choices(gemm.extents[0] * rows * columns, _k_tiles(gemm, bare), MIN_K_TILES, gpu, resident):
            for stages in _stages(gemm, bare._replace(split_k=split_k), gpu):
                for vector_n in _vectors_n(gemm, thread_n):
                    yield bare._replace(stages=stages, raster_group=raster_group, split_k=split_k, vector_n=vector_n)


def _exact_columns(n: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the columns of tiles that hold all of few columns, with the rows and columns of a thread, where the usual tiles waste many."""
    columns = -(-n // SIMT_WARP_COLUMNS) * SIMT_WARP_COLUMNS
    if min(-(-n // block) * block for block in BLOCKS_N) < EXACT_FROM * columns:
        return
    for warps in EXACT_WARPS:
        thread_n, rest = divmod(columns, SIMT_WARP_COLUMNS * warps)
        if not rest and thread_n in EXACT_THREAD_N and (thread_n > 2 or columns <= FEW_COLUMNS):
            yield from ((columns, (thread_m, thread_n)) for thread_m in (4, 8))


def _vectors_n(gemm: Contraction, thread_n: int) -> tuple[int, ...]:
    """Return how many neighbouring columns of a thread to try: where rows of the result end amid vectors, lanes store neighbours, too.

    An odd number of columns has no vectors.
    """
    if thread_n % 2:
        return (1,)
    return (SIMT_VECTOR,) if gemm.out_contiguous % SIMT_VECTOR == 0 else (SIMT_VECTOR, 1)


def _stages(gemm: Contraction, bare: GemmSimtParams, gpu: Gpu) -> list[int]:
    """Return numbers of stages worth trying: more than two where cp.async can copy, and as many as fit shared memory."""
    is_async = gpu.async_copy and min(_copied_bytes(gemm.a), _copied_bytes(gemm.b)) >= MIN_ASYNC_COPY_BYTES
    stage_bytes = smem_bytes(gemm, bare)
    batch, m, n, _ = gemm.extents
    blocks = batch * -(-m // bare.block_m) * -(-n // bare.block_n) * bare.split_k
    waits = blocks <= gpu.sm_count and FEW_BLOCKS_STAGES * stage_bytes <= gpu.smem_per_block_bytes
    tried = (*STAGES, FEW_BLOCKS_STAGES) if waits else STAGES
    fitting = (stages for stages in tried if stages == 2 or (is_async and stages * stage_bytes <= gpu.smem_per_block_optin_bytes))
    return [stages for stages in fitting if stages <= _k_tiles(gemm, bare)] or [1]


def _k_tiles(gemm: Contraction, tiling: GemmSimtParams) -> int:
    """Return the k-tiles that one thread block multiplies."""
    return -(-gemm.extents[3] // (tiling.block_k * tiling.split_k))


def _copied_bytes(operand: Operand) -> int:
    """Return the bytes of one copy: k comes first in shared memory, so an operand that has it last is copied by element."""
    return dtype_bytes(operand.dtype) * (1 if operand.is_k_last else operand.vector())


def smem_bytes(gemm: Contraction, tiling: GemmSimtParams) -> int:
    """Return the shared memory of a block, with the padding of rows whose copy transposes them."""
    total = 0
    for extent, operand in ((tiling.block_m, gemm.a), (tiling.block_n, gemm.b)):
        item_bytes = dtype_bytes(operand.dtype)
        row = -(-extent // 32) * 32 + 16 // item_bytes if operand.is_k_last else extent
        total += row * tiling.block_k * item_bytes
    return max(1, tiling.stages - 1 if tiling.stages == 2 else tiling.stages) * total


def registers(tiling: GemmSimtParams, gpu: Gpu) -> int:
    """Return the registers of a thread: its accumulators, operands of two values of k, its part of the next k-tile, and the rest.

    They are at most what lets a block of so many threads run: nvcc keeps to that.
    """
    held = (tiling.block_m + tiling.block_n) * tiling.block_k // tiling.threads if tiling.stages == 2 else 0
    wanted = tiling.thread_m * tiling.thread_n + 2 * (tiling.thread_m + tiling.thread_n) + held + OTHER_REGISTERS
    most = MAX_REGISTERS + max(0, tiling.thread_m * tiling.thread_n - MOST_ACCUMULATORS)
    return min(wanted, most, gpu.max_registers_per_thread, gpu.registers_per_block // tiling.threads // 8 * 8)


def _activates_exactly(space: IterSpace) -> bool:
    """Say whether the epilogue computes more than one operation of each result besides those with arguments, without fast math."""
    after = list(itertools.dropwhile(lambda block: not block.is_reduction, space.blocks))[1:]
    with_arguments = sum(access.operand in space.inputs for block in after for access in block.reads)
    is_wide = dtype_bytes(space.blocks[-1].writes[0].dtype) > FAST_MATH_BYTES
    return is_wide and sum(block.flops_per_point for block in after) - with_arguments > 1


def _estimate(gemm: Contraction, tiling: GemmSimtParams, gpu: Gpu, activation_cycles: float = 0.0) -> Estimate:
    """Return the time of the slowest of an SM's schedulers, L2 and DRAM.

    In the time of one k-tile, a scheduler issues the instructions of all its warps and shared memory serves them, which overlaps
    partly; a block alone waits at its barriers; and copies that were issued `stages` k-tiles before must have arrived.
    """
    batch, m, n, _ = gemm.extents
    k_tiles = _k_tiles(gemm, tiling)
    blocks = batch * -(-m // tiling.block_m) * -(-n // tiling.block_n) * tiling.split_k
    most = occupancy(gpu, tiling.threads, registers(tiling, gpu), smem_bytes(gemm, tiling))
    if not most:
        return Estimate(tiling, math.inf, (tiling.block_m, tiling.block_n))
    per_sm = -(-blocks // gpu.sm_count)
    resident = min(most, per_sm)
    k_tile_cycles = max(
        _busy_cycles(gemm, tiling, gpu, resident),
        _busy_cycles(gemm, tiling, gpu, 1) + (STORE_BARRIER_CYCLES if tiling.stages <= 2 else BARRIER_CYCLES),
        LATENCY_SECS * gpu.clock_hz / max(1, tiling.stages - 1) * (2 if tiling.stages == 1 else 1),
    )
    tile_bytes = (tiling.block_m + tiling.block_n) * tiling.block_k * dtype_bytes(gemm.a.dtype)
    traffic = dram_bytes(gemm, gpu, (tiling.block_m, tiling.block_n, tiling.raster_group), most * gpu.sm_count)
    stored_cycles = min(m, tiling.block_m) * min(n, tiling.block_n) * dtype_bytes(gemm.accum_dtype) / STORED_BYTES_PER_CYCLE
    ends, turns = START_CYCLES, per_sm / resident
    if tiling.split_k == 1:
        ends += activation_cycles * tiling.thread_m * tiling.thread_n
    secs = max(
        turns * (k_tiles * k_tile_cycles + ends) / gpu.clock_hz,
        blocks * k_tiles * tile_bytes / gpu.l2_bytes_per_s,
        traffic / gpu.dram_bytes_per_s,
    )
    # Measured: 27 us between four writes of a sector and one, for 46 MB (1403 x 8227 x 41, H200, 2026-11). Nothing hid them.
    secs += _stored_bytes(gemm, tiling) / gpu.l2_bytes_per_s
    between_turns = EXPOSED_ENDS * (turns - 1) / resident * (START_CYCLES + stored_cycles)
    secs += (per_sm * stored_cycles + between_turns) / gpu.clock_hz
    if tiling.split_k > 1:
        secs += _split_k_reduction_secs(gemm, tiling.split_k, gpu)
    return Estimate(tiling, secs + launch_secs(gpu), (tiling.block_m, tiling.block_n))


def _split_k_reduction_secs(gemm: Contraction, split_k: int, gpu: Gpu) -> float:
    """Return the time of the kernel that adds up the partial results of split-K, where a thread loads one of each part."""
    batch, m, n, _ = gemm.extents
    moved_bytes = batch * m * n * dtype_bytes(gemm.accum_dtype) * split_k
    return launch_secs(gpu) + -(-split_k // PARTS_IN_FLIGHT) * LATENCY_SECS + moved_bytes / gpu.l2_bytes_per_s


def _stored_bytes(gemm: Contraction, tiling: GemmSimtParams) -> float:
    """Return the bytes of L2's sectors that results take beside operands': lanes that store every fourth element write each four times."""
    batch, m, n, _ = gemm.extents
    times = 0 if gemm.out_contiguous % SIMT_VECTOR == 0 else tiling.vector_n
    return batch * m * n * tiling.split_k * dtype_bytes(gemm.accum_dtype) * times


def _busy_cycles(gemm: Contraction, tiling: GemmSimtParams, gpu: Gpu, blocks: int) -> float:
    """Return how long an SM's schedulers and shared memory are busy with one k-tile of so many blocks."""
    warps = blocks * tiling.threads / gpu.warp_size
    issued = _warp_cycles(gemm, tiling, gpu) * (max(1.0, warps / SM_PARTITIONS) + DEPENDENCY_STALL)
    return math.hypot(issued, warps * _smem_cycles(tiling))


def _warp_cycles(gemm: Contraction, tiling: GemmSimtParams, gpu: Gpu) -> float:
    """Return how long one warp keeps its scheduler busy with one k-tile."""
    multiplied = tiling.thread_m * tiling.thread_n * warp_fma_cycles(gpu, gemm.accum_dtype)
    computed = multiplied + (tiling.thread_m + tiling.thread_n) / 4 * SMEM_LOAD_CYCLES
    copied = _copy_cycles(gemm.a, tiling.block_m, tiling) + _copy_cycles(gemm.b, tiling.block_n, tiling)
    return tiling.block_k * computed + copied + K_TILE_CYCLES


def _smem_cycles(tiling: GemmSimtParams) -> float:
    """Return how long one warp keeps shared memory busy with one k-tile: two cycles for a vector of each lane, one for an element."""
    elements = (tiling.block_m + tiling.block_n) * tiling.block_k / tiling.threads
    columns = tiling.thread_n * (SIMT_VECTOR if tiling.vector_n == 1 else 2) / SIMT_VECTOR
    return tiling.block_k * (tiling.thread_m / 2 + columns) + elements


def _copy_cycles(operand: Operand, extent: int, tiling: GemmSimtParams) -> float:
    elements = extent * tiling.block_k / tiling.threads
    vectors = elements / math.gcd(operand.vector(), max(1, int(elements)))
    address = ADDRESS_CYCLES * (4 if operand.contiguous == 1 else 1)
    if tiling.stages <= 2:
        return vectors * (address + LOAD_CYCLES) + (elements if operand.is_k_last else vectors) * STORE_CYCLES
    if operand.is_k_last:
        return elements * (address + (ASYNC_STRIDED_CYCLES if operand.vector() == 1 else ASYNC_ELEMENT_CYCLES))
    return vectors * (address + ASYNC_VECTOR_CYCLES)
