"""Owns which tiles of a grouped GEMM a GPU should try, on mma.sync or else on CUDA cores, and in which order.

Knows nothing of TVM or of how the template applies them. Sizes of groups are known at run time alone: tiles are counted for groups of equal
expectation, whose last tile is half full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import SM_PARTITIONS, WARP_LANES
from kerneldecl.analysis.matmul_grouped import GroupedSizes, MmaGroupedParams, expected_tiles, grouped_of, mma_k_tile, mma_takes
from kerneldecl.analysis.matmul_grouped_simt import K_TILE, VECTOR, SimtGroupedParams, simt_takes
from kerneldecl.analysis.tensor_cores import FRAGMENT, K_BYTES
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu import time_model as model
from kerneldecl.policies.gpu.tensor_core_model import (
    MMA_LATENCY_CYCLES,
    Grid,
    KTile,
    multiplies_per_cycle,
    overlapped_fraction,
    sm_secs,
    start_secs,
)
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, SM_BYTES_PER_CLOCK, occupancy, p_norm

TEMPLATES = ("gpu_matmul_grouped", "gpu_matmul_grouped_simt")
AUTO = {"cuda": 17}
HAS_TRACES = False

TILES = (
    (64, 64, 2, 2),
    (64, 128, 2, 2),
    (128, 64, 2, 2),
    (128, 128, 2, 2),
    (128, 128, 2, 4),
    (128, 256, 2, 4),
    (32, 128, 1, 4),
    (16, 128, 1, 4),
)
"""Rows and columns of a tile, warps along each."""
STAGES = (5, 4, 3)
BLOCKS = (1, 2, 3)
SIMT_TILES = (
    (128, 128, 8, 8),
    (64, 128, 8, 8),
    (128, 64, 8, 8),
    (64, 64, 8, 8),
    (64, 64, 4, 8),
    (32, 128, 4, 8),
    (32, 64, 4, 4),
    (16, 128, 4, 4),
    (16, 64, 4, 4),
)
"""Rows and columns of a tile on CUDA cores, and of a thread."""
SIMT_BLOCKS = (1, 2, 3, 4, 6)
SIMT_SHARE = 0.7
"""Part of the data sheet's rate that CUDA cores reach. Assumed: 32768 x 2048 x 768 took 2.76 ms, 2.9 predicted (H200, 2026-11)."""
COPY_INSTRUCTIONS = 4
"""Instructions of an element that a thread copies: a store and a conversion, and its part of the load with its address and bounds."""
BROADCASTS = 2
"""Threads of a warp that read the same elements of shared memory at once, about."""
SCALE_INSTRUCTIONS = 2.0
"""Instructions of a lane for each sum of a k-tile with scales: it is multiplied, and added."""
OVERLAP = 4.0
"""Exponent of the p-norm of the times of SMs, L2 and DRAM, which overlap, as of `gpu_matmul_tc`."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no grouped GEMM, or for neither kernel."""
    sizes, gpu = grouped_of(space), arch.the_gpu
    if sizes is None:
        return ()
    if gpu.async_copy and mma_takes(sizes, gpu):
        timed = sorted((secs(sizes, params, gpu), params) for params in choices(sizes, gpu))
        return tuple(Proposal(params.candidate(), predicted) for predicted, params in timed[:top_k])
    return on_cuda_cores(sizes, gpu, top_k) if simt_takes(sizes) else ()


def choices(sizes: GroupedSizes, gpu: Gpu) -> Iterator[MmaGroupedParams]:
    """Yield the search space: as many stages as fit with so many thread blocks on an SM."""
    for tile, blocks in itertools.product(TILES, BLOCKS):
        fitting = (MmaGroupedParams(*tile, stages, blocks) for stages in STAGES)
        yield from itertools.islice((params for params in fitting if params.fits(sizes, gpu)), 1)


def secs(sizes: GroupedSizes, params: MmaGroupedParams, gpu: Gpu) -> float:
    """Return the predicted time of as many tiles: what an SM takes for the k-tiles of its thread blocks, L2, DRAM and the start.

    Tiles follow each other in a persistent thread block as its k-tiles do. Where mma.sync has no instruction for the dtype, tensor cores
    have the rate of converted operands: float8 on Hopper.
    """
    item = dtype_bytes(sizes.dtype)
    tiles = round(expected_tiles(sizes, params.block_m)) * -(-sizes.n // params.block_n)
    resident = min(params.blocks, occupancy(gpu, params.threads, params.registers(sizes), params.smem_bytes(sizes)))
    k_tile = mma_k_tile(sizes)
    k_tiles = -(-sizes.k // k_tile)
    warp_m, warp_n = params.warp_tile
    tile_bytes = (params.block_m + params.block_n) * k_tile * item
    read_bytes = params.threads // WARP_LANES * (warp_m + warp_n) * k_tile * item
    scaling = params.block_m * params.block_n * SCALE_INSTRUCTIONS * sizes.is_scaled / (SM_PARTITIONS * WARP_LANES)
    work = KTile(
        multiply_cycles=params.block_m * params.block_n * k_tile / multiplies_per_cycle(gpu, sizes.dtype, "float32"),
        chain_cycles=k_tile * item / K_BYTES * MMA_LATENCY_CYCLES,
        smem_cycles=(tile_bytes + read_bytes) / gpu.smem_bytes_per_clock_per_sm,
        copy_cycles=tile_bytes / SM_BYTES_PER_CLOCK,
        issue_cycles=SM_PARTITIONS * scaling,
        address_cycles=0.0,
        overlapped=overlapped_fraction(warp_m // FRAGMENT, warp_n // FRAGMENT, 1),
        register_waits=0.0,
    )
    grid = Grid(tiles, params.threads // WARP_LANES, resident, k_tiles, params.stages, epilogue_cycles=0.0)
    times = (
        sm_secs(gpu, grid, work),
        tiles * k_tiles * tile_bytes / gpu.l2_bytes_per_s,
        sizes.bytes_moved / (gpu.dram_bytes_per_s * DRAM_SHARE),
    )
    return p_norm(*times, exponent=OVERLAP) + start_secs(gpu)


def on_cuda_cores(sizes: GroupedSizes, gpu: Gpu, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time; of equal ones those with more thread blocks on an SM, which hide more waits."""
    timed = sorted((simt_secs(sizes, params, gpu), -params.blocks, params) for params in simt_choices(sizes, gpu))
    return tuple(Proposal(params.candidate(), predicted) for predicted, _, params in timed[:top_k])


def simt_choices(sizes: GroupedSizes, gpu: Gpu) -> Iterator[SimtGroupedParams]:
    """Yield the search space on CUDA cores: for each tile, as many thread blocks on an SM as fit, and the next fewer."""
    for tile in SIMT_TILES:
        fitting = [params for blocks in SIMT_BLOCKS if (params := SimtGroupedParams(*tile, blocks)).fits(sizes, gpu)]
        yield from fitting[-2:]


def simt_secs(sizes: GroupedSizes, params: SimtGroupedParams, gpu: Gpu) -> float:
    """Return the predicted time on CUDA cores: instructions of a k-tile, shared memory, L2, DRAM, and the first k-tile's way."""
    tiles = round(expected_tiles(sizes, params.block_m)) * -(-sizes.n // params.block_n)
    k_tiles = -(-sizes.k // K_TILE)
    multiplied = tiles * k_tiles * K_TILE
    operands = params.thread_m + params.thread_n
    instructions = K_TILE * (params.thread_m * params.thread_n + operands / VECTOR) + COPY_INSTRUCTIONS * sum(params.shares)
    work = model.Work(
        blocks=tiles,
        threads=params.threads,
        regs_per_thread=params.registers(sizes),
        smem_bytes=params.smem_bytes(sizes),
        flops=2.0 * tiles * k_tiles * params.threads * instructions,
        flops_per_s=gpu.simt_rate("float32") * SIMT_SHARE,
        dram_bytes=sizes.bytes_moved,
        l2_bytes=multiplied * (params.block_m + params.block_n) * dtype_bytes(sizes.dtype),
        moved_smem_bytes=4 * multiplied * params.threads * operands / BROADCASTS,
        rounds=2,
        barriers=k_tiles,
    )
    return model.predicted_secs(gpu, work)
