"""Owns which tiles of a grouped GEMM on mma.sync a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them. Sizes of groups are known at run time alone: tiles are counted for groups of equal
expectation, whose last tile is half full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import SM_PARTITIONS, WARP_LANES
from kerneldecl.analysis.matmul_grouped import GroupedSizes, MmaGroupedParams, expected_tiles, grouped_of, mma_k_tile, mma_takes
from kerneldecl.analysis.tensor_cores import FRAGMENT, K_BYTES
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
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

TEMPLATES = ("gpu_matmul_grouped",)
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
SCALE_INSTRUCTIONS = 2.0
"""Instructions of a lane for each sum of a k-tile with scales: it is multiplied, and added."""
OVERLAP = 4.0
"""Exponent of the p-norm of the times of SMs, L2 and DRAM, which overlap, as of `gpu_matmul_tc`."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no grouped GEMM, or not one for mma.sync."""
    sizes, gpu = grouped_of(space), arch.the_gpu
    if sizes is None or not gpu.async_copy or not mma_takes(sizes, gpu):
        return ()
    timed = sorted((secs(sizes, params, gpu), params) for params in choices(sizes, gpu))
    return tuple(Proposal(params.candidate(), predicted) for predicted, params in timed[:top_k])


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
