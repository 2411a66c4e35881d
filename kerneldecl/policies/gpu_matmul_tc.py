"""Owns which tiles, warps and pipelines of a GEMM on tensor cores by mma.sync a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kerneldecl.analysis.contraction import Contraction, contraction_of, why_no_tensor_cores
from kerneldecl.analysis.gpu_limits import MAX_GRID_Z, WARP_LANES
from kerneldecl.analysis.params import PERMUTED_ROWS, ROW_MULTIPLE, GemmTcParams, row_padding
from kerneldecl.analysis.tensor_cores import FRAGMENT, K_BYTES
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.conv_tiles import estimates, sliding_window_of
from kerneldecl.policies.gpu.gemm_tiles import (
    Estimate,
    Group,
    best_first,
    block_extents,
    dram_bytes,
    epilogue_smem_bytes,
    least_dram_bytes,
    raster_group_of,
    split_k_choices,
)
from kerneldecl.policies.gpu.tensor_core_model import (
    DOUBLE_BUFFER_CYCLES,
    MMA_LATENCY_CYCLES,
    ODD_RESULT_CYCLES,
    ROUNDED_DOWN,
    SMEM_EPILOGUE_CYCLES,
    STORED_BYTES_PER_CYCLE,
    SUSTAINED_CLOCK,
    TENSOR_CORE_OVERLAP,
    UNEVEN_EPILOGUE_FACTOR,
    Grid,
    KTile,
    min_sm_secs,
    multiplies_per_cycle,
    overlapped_fraction,
    residual_cycles,
    sm_secs,
    start_secs,
)
from kerneldecl.policies.gpu.tile_copies import copy_cost, is_uneven
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, LINE_BYTES, SM_BYTES_PER_CLOCK, occupancy, p_norm
from kerneldecl.policies.hopper.operands import has_residual

TEMPLATES = ("gpu_matmul_tc", "gpu_conv2d_tc")
AUTO = {"cuda": 40}

BLOCKS = (16, 32, 64, 96, 128, 192, 256)
STAGES = (5, 4, 3, 2)
WARPS = (((1, 1),), ((1, 2), (2, 1)), ((1, 4), (2, 2), (4, 1)), ((2, 4), (4, 2)))
"""Warps along the rows and the columns of a tile, by their number."""
MIN_K_TILES = 4
"""K-tiles of a thread block at least, where split-K divides the reduction."""
LONG_K = 256
"""Longest reduction without register double buffering, from which the first few k-tiles gain nothing."""
CONV_ITEM_BYTES = 2
"""Bytes of an element of an image that `gpu_conv2d_tc` convolves: lanes load pairs of elements."""
MIN_DOUBLE_BUFFER_STAGES = 3
"""Stages at least with which the template double-buffers fragments in registers."""
SAME_TILE = 4
"""Candidates of one tile that are proposed."""
NARROW = 32
"""Rows or columns of a tile up to which it waits more than it computes, and takes longer k-tiles."""
PAIR_BYTES = 4
"""Bytes of two neighbouring results of a lane, which it stores at once where they are aligned."""
OTHER_REGISTERS = 48
"""Registers of a thread besides accumulators and fragments: addresses and counters. Kernels compiled for sm_90 have 40 to 60."""
SPLIT_K_LAUNCH_FRACTION = 0.55
"""Part of a launch's time that the kernel takes which adds up split-K's partial results, besides their bytes: its launch overlaps with the
kernel before. Fitted to 60 GEMMs and convolutions of 3 to 8 us, as all of them were predicted 1.2 times too slow (H200, 2026-11)."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for what tensor cores do not take."""
    return tuple(itertools.islice(proposals(space, arch), top_k))


def proposals(space: IterSpace, arch: Arch) -> Iterator[Proposal]:
    """Yield what `propose` returns, and time no more tilings than that takes."""
    gemm, gpu = contraction_of(space), arch.the_gpu
    if isinstance(gemm, str) or why_not(space, arch):
        return iter(())
    window = sliding_window_of(space, gemm) if dtype_bytes(gemm.a.dtype) == CONV_ITEM_BYTES else None
    loads_residual = has_residual(space)
    convolutions = [Group(0.0, functools.partial(estimates, window, gemm, gpu, loads_residual=loads_residual))] if window else []
    return best_first((*convolutions, *_groups(gemm, gpu, loads_residual=loads_residual)), SAME_TILE)


def with_stages(space: IterSpace, arch: Arch, top_k: int, stages: int) -> tuple[Proposal, ...]:
    """Return the tilings with so many stages, best first; nothing for what tensor cores do not take."""
    gemm, gpu = contraction_of(space), arch.the_gpu
    if isinstance(gemm, str) or why_not(space, arch):
        return ()
    groups = _groups(gemm, gpu, (stages,), loads_residual=has_residual(space))
    return tuple(itertools.islice(best_first(groups, SAME_TILE), top_k))


def why_not(space: IterSpace, arch: Arch) -> str:
    """Return why tensor cores do not take a computation, as a sentence; empty where they do."""
    gemm = contraction_of(space)
    if isinstance(gemm, str):
        return gemm
    is_too_long = gemm.extents[0] > MAX_GRID_Z
    return why_no_tensor_cores(gemm, arch.the_gpu) or f"its batch is longer than a grid: {MAX_GRID_Z}" * is_too_long


class _Setting(NamedTuple):
    """What all tilings of a GEMM share."""

    gemm: Contraction
    gpu: Gpu
    all_stages: Sequence[int]
    """Numbers of stages; each tile is timed with the first two that fit shared memory."""
    multiplies_per_cycle: float
    least_dram_secs: float
    vectors: tuple[int, int]
    """Elements of A and of B that one copy takes at most."""
    loads_residual: bool = False
    """Whether the epilogue loads an element for each result."""

    @property
    def is_double_buffered(self) -> bool:
        """Whether the reduction is long enough for register double buffering."""
        return self.gemm.extents[3] > LONG_K


def _groups(gemm: Contraction, gpu: Gpu, all_stages: Sequence[int] = STAGES, *, loads_residual: bool = False) -> Iterator[Group]:
    """Yield the search space: tiles, to be timed with their stages."""
    setting = _Setting(
        gemm=gemm,
        gpu=gpu,
        all_stages=all_stages,
        multiplies_per_cycle=multiplies_per_cycle(gpu, gemm.a.dtype, gemm.accum_dtype),
        least_dram_secs=least_dram_bytes(gemm) / (gpu.dram_bytes_per_s * DRAM_SHARE),
        vectors=(gemm.a.vector(), gemm.b.vector()),
        loads_residual=loads_residual,
    )
    for layouts in _warp_layouts(setting):
        # With equally many warps, the squarest warp tiles hold and read least, and overlap most of that.
        squarest = min(layouts, key=lambda tiling: sum(tiling.warp_tile))
        yield Group(_min_secs(setting, squarest), functools.partial(_timed, setting, layouts))


def _timed(setting: _Setting, layouts: Sequence[GemmTcParams]) -> Iterator[Estimate]:
    return (_estimate(setting, tiling) for layout in layouts for tiling in _staged(setting, layout))


def _warp_layouts(setting: _Setting) -> Iterator[list[GemmTcParams]]:
    """Yield tiles whose accumulators fit registers, with split-K and the fewest stages: all layouts of equally many warps together."""
    gemm, gpu = setting.gemm, setting.gpu
    batch, m, n, k = gemm.extents
    mma_k = K_BYTES // dtype_bytes(gemm.a.dtype)
    tiles = itertools.product(block_extents(m, BLOCKS), block_extents(n, BLOCKS), (2 * mma_k, 4 * mma_k, 8 * mma_k))
    for block_m, block_n, block_k in tiles:
        if block_k > 4 * mma_k and min(block_m, block_n) > NARROW:
            continue
        splits = split_k_choices(batch * -(-m // block_m) * -(-n // block_n), -(-k // block_k), MIN_K_TILES, gpu)
        for split_k, all_warps in itertools.product(splits, WARPS):
            layouts = (
                GemmTcParams(
                    block_m=block_m,
                    block_n=block_n,
                    block_k=block_k,
                    warps_m=warps_m,
                    warps_n=warps_n,
                    stages=min(setting.all_stages),
                    split_k=split_k,
                )
                for warps_m, warps_n in all_warps
                if _is_sensible(block_m, block_n, warps_m, warps_n)
            )
            if fitting := [layout for layout in layouts if registers(gemm, layout) <= gpu.max_registers_per_thread]:
                yield fitting


def _staged(setting: _Setting, layout: GemmTcParams) -> Iterator[GemmTcParams]:
    """Yield a tiling with the most stages that fit shared memory, and with one less; for short reductions, each with both epilogues.

    For long reductions whose double-buffered fragments fit registers, yield that with the epilogue through shared memory instead, and
    the most stages that keep no block off an SM: while a block stores its results, it does nothing else.
    """
    gemm, gpu, all_stages = setting.gemm, setting.gpu, setting.all_stages
    limit = gpu.smem_per_block_optin_bytes
    most = min(_k_tiles(gemm, layout) + 1, limit // _stage_bytes(gemm, layout))
    fitting = [stages for stages in all_stages if stages <= most][:2]
    fits_epilogue = epilogue_smem_bytes(gemm, layout.block_m, layout.block_n) <= limit
    buffered = layout._replace(stages=MIN_DOUBLE_BUFFER_STAGES, smem_epilogue=int(fits_epilogue), double_buffer=1)
    has_stages = most >= MIN_DOUBLE_BUFFER_STAGES in all_stages
    if setting.is_double_buffered and gpu.async_copy and has_stages and (resident := _resident(gemm, buffered, gpu)):
        wanted = min(resident, -(-_blocks(gemm, layout) // gpu.sm_count))
        deeper = (buffered._replace(stages=stages) for stages in all_stages if MIN_DOUBLE_BUFFER_STAGES <= stages <= most)
        yield next(tiling for tiling in deeper if _resident(gemm, tiling, gpu) >= wanted)
        yield layout._replace(stages=fitting[0])
        return
    epilogues = (0, 1) if fits_epilogue and not setting.is_double_buffered else (0,)
    for stages, smem_epilogue in itertools.product(fitting, epilogues):
        yield layout._replace(stages=stages, smem_epilogue=smem_epilogue)


def _is_sensible(block_m: int, block_n: int, warps_m: int, warps_n: int) -> bool:
    """Say whether warps have whole fragments each, neither too many for registers nor in a warp tile much longer than wide."""
    if block_m % (FRAGMENT * warps_m) or block_n % (FRAGMENT * warps_n):
        return False
    warp_m, warp_n = block_m // warps_m, block_n // warps_n
    return warp_m * warp_n <= 128 * 64 and max(warp_m, warp_n) <= 8 * min(warp_m, warp_n)


def smem_bytes(gemm: Contraction, tiling: GemmTcParams) -> int:
    """Return the shared memory of a block: all stages of both operands, or in their place the results of its epilogue."""
    operands = tiling.stages * _stage_bytes(gemm, tiling)
    return max(operands, epilogue_smem_bytes(gemm, tiling.block_m, tiling.block_n)) if tiling.smem_epilogue else operands


def _stage_bytes(gemm: Contraction, tiling: GemmTcParams) -> int:
    item_bytes = dtype_bytes(gemm.a.dtype)
    a = _tile_bytes(tiling.block_m, tiling.block_k, item_bytes, is_k_last=gemm.a.is_k_last)
    return a + _tile_bytes(tiling.block_n, tiling.block_k, item_bytes, is_k_last=gemm.b.is_k_last)


def _tile_bytes(extent: int, block_k: int, item_bytes: int, *, is_k_last: bool) -> int:
    rows, columns = (extent, block_k) if is_k_last else (block_k, extent)
    # As in the template, rows that cannot be permuted are padded.
    if item_bytes != 2 or columns not in PERMUTED_ROWS:
        columns = -(-columns // ROW_MULTIPLE) * ROW_MULTIPLE + row_padding(item_bytes)
    return rows * columns * item_bytes


def registers(gemm: Contraction, tiling: GemmTcParams) -> int:
    """Return the registers of a thread: its accumulators, its fragments, twice as many if double-buffered, and the rest."""
    warp_m, warp_n = tiling.warp_tile
    accumulators = warp_m * warp_n * dtype_bytes(gemm.accum_dtype) // (WARP_LANES * 4)
    return accumulators + (1 + tiling.double_buffer) * (warp_m + warp_n) * K_BYTES // (WARP_LANES * 4) + OTHER_REGISTERS


def _resident(gemm: Contraction, tiling: GemmTcParams, gpu: Gpu) -> int:
    return occupancy(gpu, tiling.warps * gpu.warp_size, registers(gemm, tiling), smem_bytes(gemm, tiling))


def _blocks(gemm: Contraction, tiling: GemmTcParams) -> int:
    """Return how many thread blocks the kernel has."""
    batch, m, n, _ = gemm.extents
    return batch * -(-m // tiling.block_m) * -(-n // tiling.block_n) * tiling.split_k


def _k_tiles(gemm: Contraction, tiling: GemmTcParams) -> int:
    """Return the k-tiles that one thread block multiplies."""
    return -(-gemm.extents[3] // (tiling.block_k * tiling.split_k))


def _min_secs(setting: _Setting, layout: GemmTcParams) -> float:
    """Return a lower bound of a tiling's time with any number of stages."""
    stages = 1 << (max(setting.all_stages) - 1).bit_length()
    k_tile = _k_tile(setting, layout, is_double_buffered=setting.is_double_buffered)
    stored_bytes = _stored_bytes(setting.gemm, layout, is_through_smem=True)
    grid = _grid(setting, layout, stages, stored_bytes)
    times = (min_sm_secs(setting.gpu, grid, k_tile), _l2_secs(setting.gpu, grid, k_tile, stored_bytes), setting.least_dram_secs)
    return ROUNDED_DOWN * _kernel_secs(setting, layout, times)


def _estimate(setting: _Setting, layout: GemmTcParams) -> Estimate:
    """Return the time of a tiling, with the rasterization group that suits it."""
    gemm, gpu = setting.gemm, setting.gpu
    _, m, n, _ = gemm.extents
    block_m, block_n = layout.block_m, layout.block_n
    stored_bytes = _stored_bytes(gemm, layout, is_through_smem=bool(layout.smem_epilogue))
    grid = _grid(setting, layout, layout.stages, stored_bytes)
    waited = grid.residual_cycles + _odd_results_cycles(gemm, layout) + layout.double_buffer * DOUBLE_BUFFER_CYCLES
    grid = grid._replace(epilogue_cycles=grid.epilogue_cycles * _line_share(gemm, layout), residual_cycles=waited)
    at_once = max(1, grid.resident) * gpu.sm_count
    raster_group = raster_group_of(-(-m // block_m), -(-n // block_n), at_once, block_m, block_n)
    tiling = layout._replace(raster_group=raster_group)
    k_tile = _k_tile(setting, tiling, is_double_buffered=bool(tiling.double_buffer))
    dram_secs = dram_bytes(gemm, gpu, (block_m, block_n, raster_group), at_once) / (gpu.dram_bytes_per_s * DRAM_SHARE)
    times = (sm_secs(gpu, grid, k_tile), _l2_secs(gpu, grid, k_tile, stored_bytes), dram_secs)
    return Estimate(tiling, _kernel_secs(setting, tiling, times), (block_m, block_n))


def _grid(setting: _Setting, tiling: GemmTcParams, stages: int, stored_bytes: float) -> Grid:
    stored_cycles = stored_bytes / 2 / STORED_BYTES_PER_CYCLE * (UNEVEN_EPILOGUE_FACTOR if is_uneven(tiling.block_n) else 1.0)
    loads_residual, results = setting.loads_residual and tiling.split_k == 1, tiling.block_m * tiling.block_n / (tiling.warps * WARP_LANES)
    return Grid(
        blocks=_blocks(setting.gemm, tiling),
        warps=tiling.warps,
        resident=_resident(setting.gemm, tiling, setting.gpu),
        k_tiles=_k_tiles(setting.gemm, tiling),
        stages=stages,
        epilogue_cycles=stored_cycles + tiling.smem_epilogue * SMEM_EPILOGUE_CYCLES,
        residual_cycles=residual_cycles(results, is_through_smem=bool(tiling.smem_epilogue)) if loads_residual else 0.0,
    )


def _result_bytes(gemm: Contraction, tiling: GemmTcParams) -> int:
    """Return the bytes of a result that a block stores: those of the operands, two at least, or of accumulators with split-K."""
    return dtype_bytes(gemm.accum_dtype) if tiling.split_k > 1 else max(2, dtype_bytes(gemm.a.dtype))


def _line_share(gemm: Contraction, tiling: GemmTcParams) -> float:
    """Return how many bytes the lines have that rows of a tile of results touch, for each byte of them."""
    result_bytes, n = _result_bytes(gemm, tiling), gemm.extents[2]
    piece, row = min(tiling.block_n, n) * result_bytes, n * result_bytes
    return (piece + LINE_BYTES - math.gcd(piece, row, LINE_BYTES)) / piece


def _odd_results_cycles(gemm: Contraction, tiling: GemmTcParams) -> float:
    """Return the cycles in which a thread waits for stores of single results, of rows whose pairs are not aligned."""
    is_odd = gemm.extents[2] * _result_bytes(gemm, tiling) % PAIR_BYTES > 0
    is_direct = tiling.split_k == 1 and not tiling.smem_epilogue
    return is_odd * is_direct * ODD_RESULT_CYCLES * tiling.block_m * tiling.block_n / (tiling.warps * WARP_LANES)


def _l2_secs(gpu: Gpu, grid: Grid, k_tile: KTile, stored_bytes: float) -> float:
    return grid.blocks * (grid.k_tiles * k_tile.copy_cycles * SM_BYTES_PER_CLOCK + stored_bytes) / gpu.l2_bytes_per_s


def _kernel_secs(setting: _Setting, tiling: GemmTcParams, times: tuple[float, float, float]) -> float:
    """Return the time of all kernels of a tiling whose SMs, L2 and DRAM take such times."""
    secs = p_norm(*times, exponent=TENSOR_CORE_OVERLAP)
    if tiling.split_k > 1:
        secs += _split_k_reduction_secs(setting.gemm, tiling.split_k, setting.gpu)
    return secs + start_secs(setting.gpu)


def _stored_bytes(gemm: Contraction, tiling: GemmTcParams, *, is_through_smem: bool) -> float:
    """Return the L2 traffic of storing a block's results: lanes alone, not through shared memory, store half of what L2 takes at once."""
    out_bytes = dtype_bytes(gemm.accum_dtype) * (1.0 if tiling.split_k > 1 else 0.5)  # split-K stores accumulators as they are
    return tiling.block_m * tiling.block_n * out_bytes * (1 if is_through_smem else 2)


def _split_k_reduction_secs(gemm: Contraction, split_k: int, gpu: Gpu) -> float:
    """Return the time of the kernel that adds up split-K's partial results, which move as slowly as results are stored."""
    batch, m, n, _ = gemm.extents
    moved_bytes = batch * m * n * dtype_bytes(gemm.accum_dtype) * (split_k + 1)
    bytes_per_s = STORED_BYTES_PER_CYCLE * gpu.sm_count * gpu.clock_hz * SUSTAINED_CLOCK
    return SPLIT_K_LAUNCH_FRACTION * gpu.launch_secs + moved_bytes / bytes_per_s


def _k_tile(setting: _Setting, tiling: GemmTcParams, *, is_double_buffered: bool) -> KTile:
    """Return what a block does for one k-tile.

    With register double buffering, copies of whole tiles are issued among multiplications that wait for nothing. Further instructions
    of their addresses do not overlap: GEMMs of 1024 on an H200, in tiles that divide them and in others.
    """
    gpu, item_bytes = setting.gpu, dtype_bytes(setting.gemm.a.dtype)
    warp_m, warp_n = tiling.warp_tile
    tile_bytes = (tiling.block_m + tiling.block_n) * tiling.block_k * item_bytes
    copies = copy_cost(setting.gemm, tiling, setting.vectors, is_double_buffered=is_double_buffered)._asdict()
    fragments_bytes = tiling.warps * (warp_m + warp_n) * tiling.block_k * item_bytes
    return KTile(
        multiply_cycles=tiling.block_m * tiling.block_n * tiling.block_k / setting.multiplies_per_cycle,
        chain_cycles=tiling.block_k * item_bytes / K_BYTES * MMA_LATENCY_CYCLES,
        smem_cycles=(tile_bytes + fragments_bytes) / gpu.smem_bytes_per_clock_per_sm,
        copy_cycles=tile_bytes / SM_BYTES_PER_CLOCK,
        overlapped=overlapped_fraction(warp_m // FRAGMENT, warp_n // FRAGMENT, 2 if is_double_buffered else 1),
        **copies,
    )
