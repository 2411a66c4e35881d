"""Owns which tiles and pipelines of a product on CUDA cores a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kerneldecl.analysis.contraction import Contraction, Operand, contraction_of
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu import conv_tiles_simt
from kerneldecl.policies.gpu.conv_tiles import windows_of
from kerneldecl.policies.gpu.gemm_tiles import MAX_GRID_Z, Estimate, adding_secs, block_extents, dram_bytes, parts_of, ranked, raster_of
from kerneldecl.policies.gpu.time_model import occupancy

TEMPLATES = ("gpu_matmul_simt", "gpu_conv2d_simt")
AUTO = {"cuda": 50}

BLOCKS_M = (16, 32, 64, 128, 256)
BLOCKS_N = (32, 64, 128, 256)
BLOCK_K = 8
"""Longer steps were slower wherever they were measured: their copies' addresses are computed anew for each element."""
THREAD_TILES = ((4, 4), (4, 8), (8, 4), (8, 8))
WARP_ROWS, WARP_COLUMNS = 4, 8
"""The template's: lanes of a warp."""
THREADS = range(32, 513)
STAGES = (2, 4)
LEAST_STEPS = 32
"""Of the reduction, in each part of it."""
SAME_TILE = 4
OTHER_REGISTERS = 24
"""Of a thread, beside sums, two steps' operands and what waits to be written to shared memory: what nvcc gives for sm_90."""
MOST_REGISTERS = 128
"""That nvcc gives a thread whose tile is in THREAD_TILES."""
PARTITIONS = 4
"""Of an SM, each with a scheduler that starts one instruction a cycle."""

# Of a thread, in cycles of its scheduler, fitted to the times of 320 kernels on an H200.
ADDRESS = 4.0
"""Of one access to global memory; four times as much where elements lie apart."""
ASYNC_ELEMENT, ASYNC_VECTOR, ASYNC_APART = 10.0, 1.0, 22.0
"""A copy by cp.async of 4 bytes, which is written to shared memory across rows, and of 16; of 4 bytes where elements lie apart, as those
of a convolution's windows do, which are beyond the image, or not, one by one."""
LOAD, STORE = 7.0, 2.5
"""To registers, and from there to shared memory."""
FRAGMENT_LOAD = 1.2
STEP = 12.0
"""Of one tile along k: barriers and the loop."""
BARRIER_CYCLES, WRITING_CYCLES = 50.0, 350.0
"""How long a block waits at its barriers in each tile, and where its threads write to shared memory in between; other blocks
on the SM use the time."""
LATENCY_SECS = 6e-7
"""From asking for a tile to having it in shared memory."""
START_CYCLES = 6000.0
"""Of a block: the first tiles, and the results' way out."""
ALONE = 0.3
"""Of a warp's instructions, what it waits for its own earlier ones when its scheduler has no other warp; half of it with two."""


@dataclass(frozen=True)
class Tiling:
    """The template's parameters."""

    block_m: int
    block_n: int
    block_k: int
    thread_m: int
    thread_n: int
    stages: int
    raster_group: int = 1
    split_k: int = 1

    @property
    def threads(self) -> int:
        return self.block_m // self.thread_m * (self.block_n // self.thread_n)

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_matmul_simt", {name: getattr(self, name) for name in self.__dataclass_fields__})


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what is no product."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or gemm.extents[0] > MAX_GRID_Z:
        return ()
    gpu = arch.the_gpu
    windows = windows_of(space, gemm)
    found = itertools.chain(
        (_estimate(gemm, tiling, gpu) for tiling in tilings(gemm, gpu)),
        conv_tiles_simt.estimates(windows, gemm, gpu) if windows else (),
    )
    return tuple(itertools.islice(ranked(found, SAME_TILE), top_k))


def tilings(gemm: Contraction, gpu: Gpu) -> Iterator[Tiling]:
    """Yield the lattice: tiles that whole warps divide, with the most stages that fit shared memory."""
    _, m, n, _ = gemm.extents
    for block_m, block_n, (thread_m, thread_n) in itertools.product(block_extents(m, BLOCKS_M), block_extents(n, BLOCKS_N), THREAD_TILES):
        bare = Tiling(block_m, block_n, BLOCK_K, thread_m, thread_n, 1)
        if block_m % (thread_m * WARP_ROWS) or block_n % (thread_n * WARP_COLUMNS) or bare.threads not in THREADS:
            continue
        rows, columns = -(-m // block_m), -(-n // block_n)
        resident = max(1, occupancy(gpu, bare.threads, registers(bare, gpu), smem_bytes(gemm, bare)))
        raster_group = raster_of(rows, columns, resident * gpu.sm_count, block_m, block_n)
        steps = -(-gemm.extents[3] // BLOCK_K)
        for split_k in parts_of(gemm.extents[0] * rows * columns, steps, LEAST_STEPS, gpu, resident):
            for stages in _stages(gemm, replace(bare, split_k=split_k), gpu):
                yield replace(bare, stages=stages, raster_group=raster_group, split_k=split_k)


def _stages(gemm: Contraction, bare: Tiling, gpu: Gpu) -> list[int]:
    """Return numbers of stages worth trying: more than two where cp.async can copy, and as many as fit shared memory."""
    can = gpu.async_copy and min(_copied_bytes(gemm.a), _copied_bytes(gemm.b)) >= 4
    steps, stage_bytes = _steps(gemm, bare), smem_bytes(gemm, bare)
    fitting = (stages for stages in STAGES if stages == 2 or (can and stages * stage_bytes <= gpu.smem_per_block_optin_bytes))
    return [stages for stages in fitting if stages <= steps] or [1]


def _steps(gemm: Contraction, tiling: Tiling) -> int:
    """Return the tiles along k that one block goes through."""
    return -(-gemm.extents[3] // (tiling.block_k * tiling.split_k))


def _copied_bytes(operand: Operand) -> int:
    """Return how much one copy takes: k comes first in shared memory, so an operand that has it last is copied by element."""
    return dtype_bytes(operand.dtype) * (1 if operand.is_k_last else operand.vector())


def smem_bytes(gemm: Contraction, tiling: Tiling) -> int:
    """Return the shared memory of a block, with the padding of rows whose copy transposes them."""
    total = 0
    for extent, operand in ((tiling.block_m, gemm.a), (tiling.block_n, gemm.b)):
        item_bytes = dtype_bytes(operand.dtype)
        row = -(-extent // 32) * 32 + 16 // item_bytes if operand.is_k_last else extent
        total += row * tiling.block_k * item_bytes
    return max(1, tiling.stages - 1 if tiling.stages == 2 else tiling.stages) * total


def registers(tiling: Tiling, gpu: Gpu) -> int:
    """Return the registers of a thread: its sums, the operands of two steps, what it holds of the next tiles, and the rest.

    No more than let a block of so many threads run: nvcc keeps to that.
    """
    held = (tiling.block_m + tiling.block_n) * tiling.block_k // tiling.threads if tiling.stages == 2 else 0
    wanted = tiling.thread_m * tiling.thread_n + 2 * (tiling.thread_m + tiling.thread_n) + held + OTHER_REGISTERS
    return min(wanted, MOST_REGISTERS, gpu.max_registers_per_thread, gpu.registers_per_block // tiling.threads // 8 * 8)


def _estimate(gemm: Contraction, tiling: Tiling, gpu: Gpu) -> Estimate:
    """Return the time of the slowest of an SM's schedulers, the memories, and the way to them.

    In the time of one tile along k, a scheduler starts the instructions of all warps that it has, and shared memory
    serves them, which overlaps in part; one block alone waits at its barriers; and what was asked for so many tiles
    before must have come.
    """
    batch, m, n, _ = gemm.extents
    steps = _steps(gemm, tiling)
    blocks = batch * -(-m // tiling.block_m) * -(-n // tiling.block_n) * tiling.split_k
    most = occupancy(gpu, tiling.threads, registers(tiling, gpu), smem_bytes(gemm, tiling))
    if not most:
        return Estimate(tiling, math.inf, (tiling.block_m, tiling.block_n))
    share = -(-blocks // gpu.sm_count)
    resident = min(most, share)
    step_cycles = max(
        _busy_cycles(gemm, tiling, gpu, resident),
        _busy_cycles(gemm, tiling, gpu, 1) + (WRITING_CYCLES if tiling.stages <= 2 else BARRIER_CYCLES),
        LATENCY_SECS * gpu.clock_hz / max(1, tiling.stages - 1) * (2 if tiling.stages == 1 else 1),
    )
    tile_bytes = (tiling.block_m + tiling.block_n) * tiling.block_k * dtype_bytes(gemm.a.dtype)
    traffic = dram_bytes(gemm, gpu, (tiling.block_m, tiling.block_n, tiling.raster_group), most * gpu.sm_count)
    secs = max(
        share / resident * (steps * step_cycles + START_CYCLES) / gpu.clock_hz,
        blocks * steps * tile_bytes / gpu.l2_bytes_per_s,
        traffic / gpu.dram_bytes_per_s,
    )
    if tiling.split_k > 1:
        secs += adding_secs(gemm, tiling.split_k, gpu)
    return Estimate(tiling, secs + gpu.launch_secs, (tiling.block_m, tiling.block_n))


def _busy_cycles(gemm: Contraction, tiling: Tiling, gpu: Gpu, blocks: int) -> float:
    """Return how long an SM's schedulers and shared memory are busy with one tile along k of so many blocks."""
    warps = blocks * tiling.threads / gpu.warp_size
    started = _warp_cycles(gemm, tiling, gpu) * (max(1.0, warps / PARTITIONS) + ALONE)
    return math.hypot(started, warps * _smem_cycles(tiling))


def _warp_cycles(gemm: Contraction, tiling: Tiling, gpu: Gpu) -> float:
    """Return how long one warp keeps its scheduler busy with one tile along k."""
    rate = gpu.simt_rate(gemm.accum_dtype) or gpu.simt_rate("float32")
    # A multiply-add of a warp keeps a partition's cores busy for this long.
    multiply = 2.0 * gpu.warp_size * PARTITIONS * gpu.sm_count * gpu.clock_hz / rate
    computed = tiling.thread_m * tiling.thread_n * multiply + (tiling.thread_m + tiling.thread_n) / 4 * FRAGMENT_LOAD
    copied = _copy_cycles(gemm.a, tiling.block_m, tiling) + _copy_cycles(gemm.b, tiling.block_n, tiling)
    return tiling.block_k * computed + copied + STEP


def _smem_cycles(tiling: Tiling) -> float:
    """Return how long one warp keeps shared memory busy with one tile along k: two cycles for a vector of each lane, one for a copy."""
    elements = (tiling.block_m + tiling.block_n) * tiling.block_k / tiling.threads
    return tiling.block_k * (tiling.thread_m + tiling.thread_n) / 2 + elements


def _copy_cycles(operand: Operand, extent: int, tiling: Tiling) -> float:
    elements = extent * tiling.block_k / tiling.threads
    vectors = elements / math.gcd(operand.vector(), max(1, int(elements)))
    address = ADDRESS * (4 if operand.run == 1 else 1)
    if tiling.stages <= 2:
        return vectors * (address + LOAD) + (elements if operand.is_k_last else vectors) * STORE
    if operand.is_k_last:
        return elements * (address + (ASYNC_APART if operand.vector() == 1 else ASYNC_ELEMENT))
    return vectors * (address + ASYNC_VECTOR)
