"""Owns which parts of an image a GPU's CUDA cores should convolve at once, out of shared memory, and how long that takes.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from kerneldecl.analysis.contraction import Contraction
from kerneldecl.model import Candidate, Gpu, dtype_bytes
from kerneldecl.policies.gpu.conv_tiles import Windows
from kerneldecl.policies.gpu.gemm_tiles import Estimate, out_bytes
from kerneldecl.policies.gpu.time_model import occupancy

ROWS = (2, 4, 8, 16)
GROUPS_OF_A_ROW = (1, 2)
"""Of four, nvcc no longer finds what neighbours share."""
WALKS = (2, 1)
"""The template spells them out: with more, blocks that are at different instructions want more of them than caches hold."""
BLOCKS_N = (32, 64, 128)
THREAD_TILES = ((8, 8), (4, 8), (8, 4), (4, 4))
GROUPS, LANES = 4, 8
"""Of a warp, the template's: groups of neighbouring results, and lanes that divide channels."""
THREADS = range(64, 513)
MOST_UNROLLED = 36
"""Places of a window's line: the template spells them out, with all multiplications at each."""
OTHER_REGISTERS = 12
PARTITIONS = 4
VECTOR_BYTES, LEAST_COPY_BYTES = 16, 4
BETWEEN_BYTES = 128
"""At most, that lie between arrays in shared memory."""
LOAD = 1.2
"""Cycles of a scheduler for a load of 16 bytes from shared memory, as for products (`gpu_matmul_simt`)."""
IMAGE_CYCLES, WEIGHTS_CYCLES, RESULT_CYCLES = 12.0, 6.0, 4.0
"""For an element of the image on its way to shared memory, for a vector of weights, and for a vector of results."""
START_CYCLES = 4500.0
"""Of a block, until weights and image are there, and of its results' way; other blocks on the SM use the time. With what follows, fitted to
the times of a 7 x 7 convolution of 3 channels on an H200."""
CONFLICTS = 1.15
"""How much longer multiplying takes than the cores need: registers of one bank, whose pairs change from place to place."""
CACHED, UNCACHED = 1000, 1.15
"""Multiply-adds that are spelt out together whose instructions a scheduler's cache holds, and how much longer more of them take."""


@dataclass(frozen=True)
class Tiling:
    """The template's parameters."""

    rows: int
    columns: int
    row_tiles: int
    block_n: int
    thread_m: int
    thread_n: int

    @property
    def groups(self) -> int:
        return self.rows * self.columns // self.thread_m

    @property
    def threads(self) -> int:
        return self.groups * self.block_n // self.thread_n

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_conv2d_simt", {name: getattr(self, name) for name in self.__dataclass_fields__})


def estimates(windows: Windows, gemm: Contraction, gpu: Gpu) -> Iterator[Estimate]:
    """Yield what a GPU can hold, with its time."""
    has_both_sides = windows.row_reach and windows.column_reach
    if not has_both_sides or gemm.b.is_k_last or gemm.extents[3] // windows.lines > MOST_UNROLLED:
        return
    for tiling in tilings(windows, gemm, gpu):
        if smem_bytes(windows, gemm, tiling) <= gpu.smem_per_block_optin_bytes:
            yield Estimate(tiling, _secs(windows, gemm, tiling, gpu), (tiling.rows, tiling.columns, tiling.block_n))


def tilings(windows: Windows, gemm: Contraction, gpu: Gpu) -> Iterator[Tiling]:
    """Yield the lattice: parts of an image with few results beyond it, cut into whole warps; several in a block where cp.async can copy."""
    n = gemm.extents[2]
    walks = WALKS if gpu.async_copy and dtype_bytes(gemm.a.dtype) >= LEAST_COPY_BYTES else WALKS[-1:]
    blocks_n = [size for size in BLOCKS_N if size < 2 * n] or BLOCKS_N[:1]
    for rows, groups, block_n, (thread_m, thread_n), row_tiles in itertools.product(ROWS, GROUPS_OF_A_ROW, blocks_n, THREAD_TILES, walks):
        if -(-windows.rows // rows) % row_tiles:
            continue
        tiling = Tiling(rows, groups * thread_m, row_tiles, block_n, thread_m, thread_n)
        is_whole = tiling.groups % GROUPS == 0 and block_n % (thread_n * LANES) == 0 and tiling.threads in THREADS
        if is_whole and rows < 2 * windows.rows and tiling.columns < 2 * windows.columns:
            yield tiling


def registers(windows: Windows, tiling: Tiling, gpu: Gpu) -> int:
    """Return the registers of a thread: sums, what its results look at together of a row of the image, weights of a place, and the rest."""
    seen = (tiling.thread_m - 1) * windows.column_step * windows.channels + 1
    wanted = tiling.thread_m * tiling.thread_n + seen + tiling.thread_n + OTHER_REGISTERS
    return min(wanted, gpu.max_registers_per_thread, gpu.registers_per_block // tiling.threads // 8 * 8)


def smem_bytes(windows: Windows, gemm: Contraction, tiling: Tiling) -> int:
    """Return the shared memory of a block: its part of the image, with rows of whole vectors, and its weights."""
    weights = gemm.extents[3] * tiling.block_n * dtype_bytes(gemm.a.dtype) + BETWEEN_BYTES
    return min(tiling.row_tiles, 2) * _image_bytes(windows, gemm, tiling) + weights


def _image_bytes(windows: Windows, gemm: Contraction, tiling: Tiling) -> int:
    row_bytes = ((tiling.columns - 1) * windows.column_step + windows.column_reach + 1) * windows.channels * dtype_bytes(gemm.a.dtype)
    return ((tiling.rows - 1) * windows.row_step + windows.row_reach + 1) * -(-row_bytes // VECTOR_BYTES) * VECTOR_BYTES


def _secs(windows: Windows, gemm: Contraction, tiling: Tiling, gpu: Gpu) -> float:
    """Return the time in which an SM's schedulers start the instructions of all warps, or memory does its part."""
    _, m, n, k = gemm.extents
    resident = occupancy(gpu, tiling.threads, registers(windows, tiling, gpu), smem_bytes(windows, gemm, tiling))
    if not resident:
        return math.inf
    count = windows.images * -(-windows.rows // tiling.rows) * -(-windows.columns // tiling.columns) * -(-n // tiling.block_n)
    share = -(-count // gpu.sm_count)
    resident = min(resident, share)
    warps = tiling.threads / gpu.warp_size
    cycles = share * max(warps, PARTITIONS / resident) / PARTITIONS * _warp_cycles(windows, gemm, tiling, gpu)
    cycles += share / resident / tiling.row_tiles * START_CYCLES
    item_bytes = dtype_bytes(gemm.a.dtype)
    copied_bytes = count * (_image_bytes(windows, gemm, tiling) + k * tiling.block_n * item_bytes / tiling.row_tiles)
    least_bytes = gemm.a.size_bytes + gemm.b.size_bytes + m * n * out_bytes(gemm)
    times = (cycles / gpu.clock_hz, copied_bytes / gpu.l2_bytes_per_s, least_bytes / gpu.dram_bytes_per_s)
    return math.hypot(*times) + gpu.launch_secs


def _warp_cycles(windows: Windows, gemm: Contraction, tiling: Tiling, gpu: Gpu) -> float:
    """Return how long one warp keeps its scheduler busy."""
    k = gemm.extents[3]
    rate = gpu.simt_rate(gemm.accum_dtype) or gpu.simt_rate("float32")
    multiply = 2.0 * gpu.warp_size * PARTITIONS * gpu.sm_count * gpu.clock_hz / rate
    line = k // windows.lines
    seen = (tiling.thread_m - 1) * windows.column_step * windows.channels + line
    sums = tiling.thread_m * tiling.thread_n
    multiplied = k * sums * multiply * CONFLICTS * (UNCACHED if line * sums > CACHED else 1.0)
    loaded = (k * tiling.thread_n + windows.lines * seen) / 4 * LOAD
    item_bytes = dtype_bytes(gemm.a.dtype)
    weights = k * tiling.block_n / gemm.b.vector() / tiling.row_tiles
    copied = _image_bytes(windows, gemm, tiling) / item_bytes * IMAGE_CYCLES + weights * WEIGHTS_CYCLES
    return multiplied + loaded + copied / tiling.threads + sums / 4 * RESULT_CYCLES
