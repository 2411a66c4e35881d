"""Owns which tiles of an image a GPU's CUDA cores should convolve at once out of shared memory, and how long that takes.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.analysis.gpu_limits import MIN_ASYNC_COPY_BYTES, SM_PARTITIONS, VECTOR_BYTES
from kerneldecl.analysis.params import SIMT_WARP_COLUMNS, SIMT_WARP_ROWS, ConvSimtParams
from kerneldecl.model import Gpu, dtype_bytes
from kerneldecl.policies.gpu.conv_tiles import SlidingWindow
from kerneldecl.policies.gpu.gemm_tiles import Estimate, out_bytes
from kerneldecl.policies.gpu.time_model import SMEM_LOAD_CYCLES, occupancy, warp_fma_cycles

ROWS = (2, 4, 8, 16)
COLUMN_GROUPS = (1, 2)
"""Groups of a thread's neighbouring output pixels in a row of a tile: with four, nvcc no longer finds the loads that neighbours share."""
ROW_TILES = (2, 1)
"""Tiles that a block computes in turn. The template unrolls them: with more, blocks at different instructions need more of those than
instruction caches hold."""
BLOCKS_N = (32, 64, 128)
THREAD_TILES = ((8, 8), (4, 8), (8, 4), (4, 4))
THREADS = range(64, 513)
MAX_UNROLLED = 36
"""Elements of a filter's row at most: the template unrolls them, with all multiplications of each."""
OTHER_REGISTERS = 12
"""Registers of a thread besides accumulators and operands."""
SMEM_GAP_BYTES = 128
"""Bytes between arrays in shared memory at most."""
IMAGE_CYCLES, WEIGHTS_CYCLES, RESULT_CYCLES = 12.0, 6.0, 4.0
"""Cycles of a scheduler to copy an element of the image to shared memory, to copy a vector of weights, and to store a vector of results."""
START_CYCLES = 4500.0
"""Cycles of a block until weights and image have arrived, and of its results' way; other blocks on the SM overlap with them. START_CYCLES
and what follows are fitted to the times of a 7 x 7 convolution of 3 channels on an H200."""
BANK_CONFLICTS = 1.15
"""How much longer multiplying takes than the CUDA cores need: operands in registers of one bank."""
CACHED_FMAS, UNCACHED_SLOWDOWN = 1000, 1.15
"""Unrolled multiply-adds whose instructions a scheduler's cache holds, and how much longer more of them take."""


def estimates(window: SlidingWindow, gemm: Contraction, gpu: Gpu) -> Iterator[Estimate]:
    """Yield the tilings that fit a GPU's shared memory, with their times."""
    has_both_halos = window.row_halo and window.column_halo
    if not has_both_halos or gemm.b.is_k_last or gemm.extents[3] // window.filter_rows > MAX_UNROLLED:
        return
    for tiling in tilings(window, gemm, gpu):
        if smem_bytes(window, gemm, tiling) <= gpu.smem_per_block_optin_bytes:
            yield Estimate(tiling, _secs(window, gemm, tiling, gpu), (tiling.rows, tiling.columns, tiling.block_n))


def tilings(window: SlidingWindow, gemm: Contraction, gpu: Gpu) -> Iterator[ConvSimtParams]:
    """Yield the search space: tiles that hardly reach beyond the image, in whole warps; several per block where cp.async can copy."""
    n = gemm.extents[2]
    row_tiles_choices = ROW_TILES if gpu.async_copy and dtype_bytes(gemm.a.dtype) >= MIN_ASYNC_COPY_BYTES else ROW_TILES[-1:]
    blocks_n = [size for size in BLOCKS_N if size < 2 * n] or BLOCKS_N[:1]
    tiles = itertools.product(ROWS, COLUMN_GROUPS, blocks_n, THREAD_TILES, row_tiles_choices)
    for rows, column_groups, block_n, (thread_m, thread_n), row_tiles in tiles:
        if -(-window.rows // rows) % row_tiles:
            continue
        tiling = ConvSimtParams(
            rows=rows,
            columns=column_groups * thread_m,
            row_tiles=row_tiles,
            block_n=block_n,
            thread_m=thread_m,
            thread_n=thread_n,
        )
        is_whole = tiling.groups % SIMT_WARP_ROWS == 0 and block_n % (thread_n * SIMT_WARP_COLUMNS) == 0 and tiling.threads in THREADS
        if is_whole and rows < 2 * window.rows and tiling.columns < 2 * window.columns:
            yield tiling


def registers(window: SlidingWindow, tiling: ConvSimtParams, gpu: Gpu) -> int:
    """Return the registers of a thread: accumulators, a row of its pixels' receptive field, weights of a filter element, and the rest."""
    row_elements = (tiling.thread_m - 1) * window.column_stride * window.channels + 1
    wanted = tiling.thread_m * tiling.thread_n + row_elements + tiling.thread_n + OTHER_REGISTERS
    return min(wanted, gpu.max_registers_per_thread, gpu.registers_per_block // tiling.threads // 8 * 8)


def smem_bytes(window: SlidingWindow, gemm: Contraction, tiling: ConvSimtParams) -> int:
    """Return the shared memory of a block: its part of the image, with rows of whole vectors, and its weights."""
    weights = gemm.extents[3] * tiling.block_n * dtype_bytes(gemm.a.dtype) + SMEM_GAP_BYTES
    return min(tiling.row_tiles, 2) * _image_bytes(window, gemm, tiling) + weights


def _image_bytes(window: SlidingWindow, gemm: Contraction, tiling: ConvSimtParams) -> int:
    columns = (tiling.columns - 1) * window.column_stride + window.column_halo + 1
    row_bytes = columns * window.channels * dtype_bytes(gemm.a.dtype)
    return ((tiling.rows - 1) * window.row_stride + window.row_halo + 1) * -(-row_bytes // VECTOR_BYTES) * VECTOR_BYTES


def _secs(window: SlidingWindow, gemm: Contraction, tiling: ConvSimtParams, gpu: Gpu) -> float:
    """Return the time in which an SM's schedulers issue the instructions of all warps, or memory does its part."""
    _, m, n, k = gemm.extents
    resident = occupancy(gpu, tiling.threads, registers(window, tiling, gpu), smem_bytes(window, gemm, tiling))
    if not resident:
        return math.inf
    blocks = window.tiles(tiling.rows, tiling.columns) * -(-n // tiling.block_n)
    per_sm = -(-blocks // gpu.sm_count)
    resident = min(resident, per_sm)
    warps = tiling.threads / gpu.warp_size
    cycles = per_sm * max(warps, SM_PARTITIONS / resident) / SM_PARTITIONS * _warp_cycles(window, gemm, tiling, gpu)
    cycles += per_sm / resident / tiling.row_tiles * START_CYCLES
    item_bytes = dtype_bytes(gemm.a.dtype)
    copied_bytes = blocks * (_image_bytes(window, gemm, tiling) + k * tiling.block_n * item_bytes / tiling.row_tiles)
    min_bytes = gemm.a.size_bytes + gemm.b.size_bytes + m * n * out_bytes(gemm)
    times = (cycles / gpu.clock_hz, copied_bytes / gpu.l2_bytes_per_s, min_bytes / gpu.dram_bytes_per_s)
    return math.hypot(*times) + gpu.launch_secs


def _warp_cycles(window: SlidingWindow, gemm: Contraction, tiling: ConvSimtParams, gpu: Gpu) -> float:
    """Return how long one warp keeps its scheduler busy."""
    k = gemm.extents[3]
    filter_row = k // window.filter_rows
    row_elements = (tiling.thread_m - 1) * window.column_stride * window.channels + filter_row
    results = tiling.thread_m * tiling.thread_n
    slowdown = UNCACHED_SLOWDOWN if filter_row * results > CACHED_FMAS else 1.0
    multiplied = k * results * warp_fma_cycles(gpu, gemm.accum_dtype) * BANK_CONFLICTS * slowdown
    loaded = (k * tiling.thread_n + window.filter_rows * row_elements) / 4 * SMEM_LOAD_CYCLES
    item_bytes = dtype_bytes(gemm.a.dtype)
    weights = k * tiling.block_n / gemm.b.vector() / tiling.row_tiles
    copied = _image_bytes(window, gemm, tiling) / item_bytes * IMAGE_CYCLES + weights * WEIGHTS_CYCLES
    return multiplied + loaded + copied / tiling.threads + results / 4 * RESULT_CYCLES
