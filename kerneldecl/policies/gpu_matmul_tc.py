"""Owns which tiles, warps and pipelines of a product on tensor cores a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kerneldecl.analysis.contraction import FRAGMENT, Contraction, contraction_of, why_no_tensor_cores
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.conv_tiles import estimates, windows_of
from kerneldecl.policies.gpu.gemm_tiles import (
    MAX_GRID_Z,
    Estimate,
    Form,
    block_extents,
    dram_bytes,
    least_dram_bytes,
    parts_of,
    ranked,
    raster_of,
)
from kerneldecl.policies.gpu.tensor_core_model import (
    CHAIN_CYCLES,
    ROUNDED_DOWN,
    SM_BYTES_PER_CYCLE,
    STORED_BYTES_PER_CYCLE,
    SUSTAINED_CLOCK,
    Blocks,
    Step,
    hidden_part,
    least_sm_secs,
    multiplies_per_cycle,
    sm_secs,
    start_secs,
    together,
)
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, occupancy

TEMPLATES = ("gpu_matmul_tc", "gpu_conv2d_tc")
AUTO = {"cuda": 40}

BLOCKS = (16, 32, 64, 96, 128, 192, 256)
STAGES = (5, 4, 3, 2)
WARPS = (((1, 1),), ((1, 2), (2, 1)), ((1, 4), (2, 2), (4, 1)), ((2, 4), (4, 2)))
"""Along rows and columns of a tile, by their number."""
LEAST_STEPS = 4
"""Of the reduction, in each part of it."""
LONG_SUMS = 256
"""Sums of more steps have fragments loaded ahead, which the first few of a sum have nothing of."""
WINDOW_ITEM_BYTES = 2
"""Of an image whose windows overlap: lanes pick pairs of elements."""
AHEAD_STAGES = 3
"""Least with which the template loads them ahead."""
SAME_TILE = 4
NARROW = 32
"""Tiles up to this many rows or columns wait more than they compute, and take longer steps."""
OTHER_REGISTERS = 48
"""Of a thread, beside sums and fragments: addresses and counters. Kernels compiled for sm_90 have 40 to 60."""
COPY_INSTRUCTIONS, WINDOW_INSTRUCTIONS = 6.0, 14.0
"""For one copy with its address, where rows are rows, and where there are edges or a division finds a pixel in its image: as nvcc
makes them."""
COPIED_BYTES = 512
"""By a warp at once, at most."""
NARROW_VECTOR = 4
"""Bytes that are copied at once where some of them may lie beyond an operand of bytes: the template's."""
ASYNC_BYTES = 4
"""Least that cp.async copies."""


class Tiling(NamedTuple):
    """The template's parameters."""

    block_m: int
    block_n: int
    block_k: int
    warps_m: int
    warps_n: int
    stages: int
    raster_group: int = 1
    smem_epilogue: int = 0
    split_k: int = 1
    double_buffer: int = 0

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def warp_tile(self) -> tuple[int, int]:
        return self.block_m // self.warps_m, self.block_n // self.warps_n

    def candidate(self) -> Candidate:
        return Candidate.of("gpu_matmul_tc", self._asdict())


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what tensor cores do not take."""
    return tuple(itertools.islice(proposals(space, arch), top_k))


def proposals(space: IterSpace, arch: Arch) -> Iterator[Proposal]:
    """Yield what `propose` returns, and time no more than that takes."""
    gemm, gpu = contraction_of(space), arch.the_gpu
    if isinstance(gemm, str) or why_not(space, arch):
        return iter(())
    windows = windows_of(space, gemm) if dtype_bytes(gemm.a.dtype) == WINDOW_ITEM_BYTES else None
    images = [Form(0.0, functools.partial(estimates, windows, gemm, gpu))] if windows else []
    return ranked((*images, *_forms(gemm, gpu)), SAME_TILE)


def with_stages(space: IterSpace, arch: Arch, top_k: int, stages: int) -> tuple[Proposal, ...]:
    """Return the tilings with so many stages, best first; nothing for what tensor cores do not take."""
    gemm, gpu = contraction_of(space), arch.the_gpu
    if isinstance(gemm, str) or why_not(space, arch):
        return ()
    return tuple(itertools.islice(ranked(_forms(gemm, gpu, (stages,)), SAME_TILE), top_k))


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why tensor cores do not take a computation, as a sentence; empty where they do."""
    gemm = contraction_of(space)
    if isinstance(gemm, str):
        return gemm
    is_long = gemm.extents[0] > MAX_GRID_Z
    return why_no_tensor_cores(gemm, arch.the_gpu) or f"its batch is longer than a launch takes: {MAX_GRID_Z}" * is_long


class _Setting(NamedTuple):
    """What all tilings of a product are for."""

    gemm: Contraction
    gpu: Gpu
    all_stages: Sequence[int]
    """Of which each tile is timed with the first two that fit shared memory."""
    multiplies_per_cycle: float
    least_dram_secs: float
    vectors: tuple[int, int]
    """Elements that one copy of either operand takes at most."""

    @property
    def is_long(self) -> bool:
        return self.gemm.extents[3] > LONG_SUMS


def _forms(gemm: Contraction, gpu: Gpu, all_stages: Sequence[int] = STAGES) -> Iterator[Form]:
    """Yield the lattice: tiles, to be timed with their stages."""
    multiplies = multiplies_per_cycle(gpu, gemm.a.dtype, gemm.accum_dtype)
    least_dram_secs = least_dram_bytes(gemm) / (gpu.dram_bytes_per_s * DRAM_SHARE)
    setting = _Setting(gemm, gpu, all_stages, multiplies, least_dram_secs, (gemm.a.vector(), gemm.b.vector()))
    for alike in _bare_tilings(setting):
        # Of as many warps, those whose tiles are squarest hold and read least, and hide most of it.
        yield Form(_least_secs(setting, min(alike, key=_reach)), functools.partial(_timed, setting, alike))


def _reach(tiling: Tiling) -> int:
    return sum(tiling.warp_tile)


def _timed(setting: _Setting, alike: Sequence[Tiling]) -> Iterator[Estimate]:
    return (_estimate(setting, tiling) for bare in alike for tiling in _staged(setting, bare))


def _bare_tilings(setting: _Setting) -> Iterator[list[Tiling]]:
    """Yield tiles whose sums fit registers, and parts of the reduction, with the fewest stages: in all ways in which as many warps lie."""
    gemm, gpu, all_stages, *_ = setting
    batch, m, n, k = gemm.extents
    steps = 32 // dtype_bytes(gemm.a.dtype)
    tiles = itertools.product(block_extents(m, BLOCKS), block_extents(n, BLOCKS), (2 * steps, 4 * steps, 8 * steps))
    for block_m, block_n, block_k in tiles:
        if block_k > 4 * steps and min(block_m, block_n) > NARROW:
            continue
        all_parts = parts_of(batch * -(-m // block_m) * -(-n // block_n), -(-k // block_k), LEAST_STEPS, gpu)
        for split_k, layouts in itertools.product(all_parts, WARPS):
            sensible = (warps for warps in layouts if _is_sensible(block_m, block_n, *warps))
            bare = (Tiling(block_m, block_n, block_k, *warps, min(all_stages), split_k=split_k) for warps in sensible)
            if fitting := [tiling for tiling in bare if registers(gemm, tiling) <= gpu.max_registers_per_thread]:
                yield fitting


def _staged(setting: _Setting, bare: Tiling) -> Iterator[Tiling]:
    """Yield a tiling with the most stages that fit shared memory, and with one less; where sums are short, either gathered as well.

    Where they are long and registers hold two steps' fragments, those are loaded ahead and the results gathered instead, with the
    most stages that keep no block off an SM: while a block stores its results, nothing else of it goes on.
    """
    gemm, gpu, all_stages, *_ = setting
    limit = gpu.smem_per_block_optin_bytes
    most = min(_steps(gemm, bare) + 1, limit // _stage_bytes(gemm, bare))
    fitting = [stages for stages in all_stages if stages <= most][:2]
    can_gather = _gathered_bytes(gemm, bare) <= limit
    double_buffer = bare._replace(stages=AHEAD_STAGES, smem_epilogue=int(can_gather), double_buffer=1)
    if setting.is_long and gpu.async_copy and most >= AHEAD_STAGES in all_stages and (resident := _resident(gemm, double_buffer, gpu)):
        wanted = min(resident, -(-_count(gemm, bare) // gpu.sm_count))
        deeper = (double_buffer._replace(stages=stages) for stages in all_stages if AHEAD_STAGES <= stages <= most)
        yield next(tiling for tiling in deeper if _resident(gemm, tiling, gpu) >= wanted)
        yield bare._replace(stages=fitting[0])
        return
    for stages, smem_epilogue in itertools.product(fitting, (0, 1) if can_gather and not setting.is_long else (0,)):
        yield bare._replace(stages=stages, smem_epilogue=smem_epilogue)


def _is_sensible(block_m: int, block_n: int, warps_m: int, warps_n: int) -> bool:
    """Say whether warps have whole fragments each, neither too many for registers nor in a tile much longer than wide."""
    if block_m % (FRAGMENT * warps_m) or block_n % (FRAGMENT * warps_n):
        return False
    warp_m, warp_n = block_m // warps_m, block_n // warps_n
    return warp_m * warp_n <= 128 * 64 and max(warp_m, warp_n) <= 8 * min(warp_m, warp_n)


def smem_bytes(gemm: Contraction, tiling: Tiling) -> int:
    """Return the shared memory of a block: all stages of both operands, with the padding of rows that cannot be permuted.

    Results that are gathered come where the operands were.
    """
    operands = tiling.stages * _stage_bytes(gemm, tiling)
    return max(operands, _gathered_bytes(gemm, tiling)) if tiling.smem_epilogue else operands


def _stage_bytes(gemm: Contraction, tiling: Tiling) -> int:
    item_bytes = dtype_bytes(gemm.a.dtype)
    a = _tile_bytes(tiling.block_m, tiling.block_k, item_bytes, is_k_last=gemm.a.is_k_last)
    return a + _tile_bytes(tiling.block_n, tiling.block_k, item_bytes, is_k_last=gemm.b.is_k_last)


def _gathered_bytes(gemm: Contraction, tiling: Tiling) -> int:
    return tiling.block_m * (-(-tiling.block_n // 32) * 32 + 8) * dtype_bytes(gemm.accum_dtype)


def _tile_bytes(extent: int, block_k: int, item_bytes: int, *, is_k_last: bool) -> int:
    rows, columns = (extent, block_k) if is_k_last else (block_k, extent)
    # As the template has it: 16-bit rows that can be permuted are, others end 16 bytes past a multiple of 32 elements.
    if item_bytes != 2 or columns not in {32, 64, 128, 256}:
        columns = -(-columns // 32) * 32 + 16 // item_bytes
    return rows * columns * item_bytes


def registers(gemm: Contraction, tiling: Tiling) -> int:
    """Return the registers of a thread: its sums, the fragments of one step, or of two, and the rest."""
    warp_m, warp_n = tiling.warp_tile
    sums = warp_m * warp_n * dtype_bytes(gemm.accum_dtype) // (32 * 4)
    return sums + (1 + tiling.double_buffer) * (warp_m + warp_n) * 32 // (32 * 4) + OTHER_REGISTERS


def _resident(gemm: Contraction, tiling: Tiling, gpu: Gpu) -> int:
    return occupancy(gpu, tiling.warps * gpu.warp_size, registers(gemm, tiling), smem_bytes(gemm, tiling))


def _count(gemm: Contraction, tiling: Tiling) -> int:
    """Return the blocks."""
    batch, m, n, _ = gemm.extents
    return batch * -(-m // tiling.block_m) * -(-n // tiling.block_n) * tiling.split_k


def _least_secs(setting: _Setting, bare: Tiling) -> float:
    """Return a time that no number of stages is below."""
    gemm, gpu = setting.gemm, setting.gpu
    stages = 1 << (max(setting.all_stages) - 1).bit_length()
    step = _step(setting, bare, is_ahead=setting.is_long)
    steps, stored = _steps(gemm, bare), _stored_bytes(gemm, bare, is_gathered=True)
    blocks = Blocks(_count(gemm, bare), bare.warps, _resident(gemm, bare, gpu), steps, stages, stored / 2 / STORED_BYTES_PER_CYCLE)
    l2_secs = blocks.total * (steps * step.copy_cycles * SM_BYTES_PER_CYCLE + stored) / gpu.l2_bytes_per_s
    secs = together(least_sm_secs(gpu, blocks, step), l2_secs, setting.least_dram_secs)
    return ROUNDED_DOWN * (secs + (_adding_secs(gemm, bare.split_k, gpu) if bare.split_k > 1 else 0.0) + start_secs(gpu))


def _estimate(setting: _Setting, bare: Tiling) -> Estimate:
    """Return the time of a tiling, with the raster that suits it."""
    gemm, gpu = setting.gemm, setting.gpu
    _, m, n, _ = gemm.extents
    rows, columns = -(-m // bare.block_m), -(-n // bare.block_n)
    resident = _resident(gemm, bare, gpu)
    at_once = max(1, resident) * gpu.sm_count
    tiling = bare._replace(raster_group=raster_of(rows, columns, at_once, bare.block_m, bare.block_n))
    step = _step(setting, tiling, is_ahead=bool(tiling.double_buffer))
    steps, stored = _steps(gemm, tiling), _stored_bytes(gemm, tiling, is_gathered=bool(tiling.smem_epilogue))
    blocks = Blocks(_count(gemm, tiling), tiling.warps, resident, steps, tiling.stages, stored / 2 / STORED_BYTES_PER_CYCLE)
    l2_bytes = blocks.total * (steps * step.copy_cycles * SM_BYTES_PER_CYCLE + stored)
    tile = (tiling.block_m, tiling.block_n, tiling.raster_group)
    secs = together(
        sm_secs(gpu, blocks, step),
        l2_bytes / gpu.l2_bytes_per_s,
        dram_bytes(gemm, gpu, tile, at_once) / (gpu.dram_bytes_per_s * DRAM_SHARE),
    )
    if tiling.split_k > 1:
        secs += _adding_secs(gemm, tiling.split_k, gpu)
    return Estimate(tiling, secs + start_secs(gpu), (tiling.block_m, tiling.block_n))


def _steps(gemm: Contraction, tiling: Tiling) -> int:
    """Return the tiles of the reduction that a block multiplies."""
    return -(-gemm.extents[3] // (tiling.block_k * tiling.split_k))


def _stored_bytes(gemm: Contraction, tiling: Tiling, *, is_gathered: bool) -> float:
    """Return what storing a block's results takes of L2: twice as much for lanes alone, which store half of what it takes in one go."""
    out_bytes = dtype_bytes(gemm.accum_dtype) * (1.0 if tiling.split_k > 1 else 0.5)  # sums of a part are stored as they are
    return tiling.block_m * tiling.block_n * out_bytes * (1 if is_gathered else 2)


def _adding_secs(gemm: Contraction, split_k: int, gpu: Gpu) -> float:
    """Return the time of the kernel that adds the parts of a reduction: they come as slowly as they left, and the results leave again."""
    batch, m, n, _ = gemm.extents
    moved = batch * m * n * dtype_bytes(gemm.accum_dtype) * (split_k + 1)
    return gpu.launch_secs + moved / (STORED_BYTES_PER_CYCLE * gpu.sm_count * gpu.clock_hz * SUSTAINED_CLOCK)


def _step(setting: _Setting, tiling: Tiling, *, is_ahead: bool) -> Step:
    """Return what a block does for one tile of the reduction.

    With fragments loaded ahead, whole copies are asked for among multiplications that wait for nothing. What else their addresses
    take is not hidden: products of 1024 on an H200, in tiles that divide them and in others.
    """
    gemm, gpu = setting.gemm, setting.gpu
    item_bytes = dtype_bytes(gemm.a.dtype)
    warp_m, warp_n = tiling.warp_tile
    threads = tiling.warps * gpu.warp_size
    _, m, n, k = gemm.extents
    tile_bytes = (tiling.block_m + tiling.block_n) * tiling.block_k * item_bytes
    issue, copies = -tile_bytes / COPIED_BYTES * COPY_INSTRUCTIONS if is_ahead else 0.0, 0.0
    is_k_whole, has_rows = k % (tiling.block_k * tiling.split_k) == 0, len(gemm.k) == 1
    operands = ((tiling.block_m, m, gemm.m, setting.vectors[0]), (tiling.block_n, n, gemm.n, setting.vectors[1]))
    for extent, size, axes, widest in operands:
        is_whole, elements = is_k_whole and size % extent == 0, extent * tiling.block_k
        vector = math.gcd(widest, max(1, elements // threads))
        vectors = elements / (vector if is_whole or item_bytes > 1 else math.gcd(vector, NARROW_VECTOR))
        issue += vectors / gpu.warp_size * (COPY_INSTRUCTIONS if is_whole and has_rows and len(axes) == 1 else WINDOW_INSTRUCTIONS)
        if widest * item_bytes < ASYNC_BYTES:
            copies += vectors / threads
    fragments_bytes = tiling.warps * (warp_m + warp_n) * tiling.block_k * item_bytes
    return Step(
        multiply_cycles=tiling.block_m * tiling.block_n * tiling.block_k / setting.multiplies_per_cycle,
        chain_cycles=tiling.block_k * item_bytes / 32 * CHAIN_CYCLES,
        smem_cycles=(tile_bytes + fragments_bytes) / gpu.smem_bytes_per_clock_per_sm,
        copy_cycles=tile_bytes / SM_BYTES_PER_CYCLE,
        issue_cycles=issue,
        hidden=hidden_part(warp_m // FRAGMENT, warp_n // FRAGMENT, 2 if is_ahead else 1),
        copies=copies,
    )
