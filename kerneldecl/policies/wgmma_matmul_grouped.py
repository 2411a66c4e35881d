"""Owns which tiles and clusters of a grouped GEMM on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them. Sizes of groups are known at run time alone: tiles are counted for groups of equal
expectation, whose last tile is half full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis import tensor_cores
from kerneldecl.analysis.hopper_limits import (
    K_TILE_BYTES,
    MAX_ACCUM_REGISTERS,
    MAX_STAGES,
    MIN_STAGES,
    MMA_TILE_ROWS,
    PREFERRED_ACCUM_REGISTERS,
)
from kerneldecl.analysis.matmul_grouped import (
    GroupedSizes,
    WgmmaGroupedParams,
    expected_tiles,
    grouped_epilogue_buffers,
    grouped_of,
    wgmma_takes,
)
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.hopper import time_model as model

TEMPLATES = ("wgmma_matmul_grouped",)
AUTO = {"cuda": 16}
HAS_TRACES = False

TILES = (
    *((block_m, consumers, "cooperative") for block_m, consumers in ((64, 1), (128, 1), (128, 2), (192, 3), (256, 2))),
    (64, 2, "pingpong"),
    (128, 2, "pingpong"),
)
"""Rows of a tile, consumers, and their schedule. Staggered ones took 1.00 to 1.03 of the time of those that share a tile at once, 1.2 with
128 columns."""
BLOCKS_N = (64, 128, 192, 256)
CLUSTERS = (1, 2, 4)
FEWER_STAGES = 4
"""Stages to try besides the most that fit: fewer leave room for epilogue buffers."""
RASTER_GROUP = 16
"""Rows of tiles before the next column: as many as groups of 2048 rows have."""
TABLES_SECS = 2e-6
"""Seconds in which CTAs read the sizes and add up rows of tiles, and those of the first loads behind that. Assumed."""
TILE_SECS = {"cooperative": 1.1e-6, "pingpong": 2e-7}
"""Seconds of a tile besides those of a GEMM's. Fitted by hand, as the next one: where tiles are shared kernels of 32768 x
2048 x 768 with 128 groups took 0.91 to 1.03 of the prediction, in turns 20 kernels of six computations 0.92 to 1.12 (bfloat16, H200,
2026-11-28)."""
CLUSTER_FACTORS = {"cooperative": {1: 1.0, 2: 1.04, 4: 1.10}, "pingpong": {1: 1.0, 2: 0.94, 4: 0.97}}
"""Times by the CTAs of a cluster: tensor cores that never wait for an epilogue need more of L2, of which sharing rows of A takes less. With
four CTAs in turns nothing was timed."""
SAME_TILE = 3
"""Proposals of one tile at most."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no grouped GEMM, or not one for wgmma."""
    sizes, gpu = grouped_of(space), arch.the_gpu
    if sizes is None or why_not(sizes, gpu):
        return ()
    timed = sorted((secs(sizes, params, gpu), params) for params in choices(sizes))
    found: list[Proposal] = []
    of_tile: dict[tuple[int, int, str], int] = {}
    for predicted, params in timed:
        tile = (params.block_m, params.block_n, params.kernel_schedule)
        of_tile[tile] = of_tile.get(tile, 0) + 1
        if of_tile[tile] <= SAME_TILE:
            found.append(Proposal(params.candidate(), predicted))
    return tuple(found[:top_k])


def why_not(sizes: GroupedSizes, gpu: Gpu) -> str:
    """Return why the template does not take a grouped GEMM, as a sentence; empty where it does."""
    if gpu.compute_capability[0] != tensor_cores.first_capability("wgmma")[0]:
        return "the GPU has no wgmma"
    return "" if wgmma_takes(sizes) else "elements are neither of 16 bits nor float8, rows no whole 16 bytes, or there are too many groups"


def choices(sizes: GroupedSizes) -> Iterator[WgmmaGroupedParams]:
    """Yield the search space: tiles whose accumulators fit registers, with the most stages that fit, or fewer."""
    for (block_m, consumers, schedule), block_n, cluster_n in itertools.product(TILES, BLOCKS_N, CLUSTERS):
        params = WgmmaGroupedParams(block_m, block_n, consumers, MIN_STAGES, cluster_n, RASTER_GROUP, schedule)
        # In turns, two tiles of 192 columns are worth the registers: there are epilogues that nobody waits for.
        most = MAX_ACCUM_REGISTERS if schedule == "pingpong" else PREFERRED_ACCUM_REGISTERS
        if params.gemm.thread_accumulators > most[consumers]:
            continue
        deepest = [stages for stages in range(MAX_STAGES, MIN_STAGES, -1) if params._replace(stages=stages).fits(sizes)]
        for stages in dict.fromkeys((*deepest[:1], *(each for each in deepest if each == FEWER_STAGES))):
            yield params._replace(stages=stages)


def secs(sizes: GroupedSizes, params: WgmmaGroupedParams, gpu: Gpu) -> float:
    """Return the predicted time: that of as many tiles of a GEMM, and the tables."""
    item, out_item = dtype_bytes(sizes.dtype), dtype_bytes(sizes.out_dtype)
    columns = -(-sizes.n // (params.block_n * params.cluster_n)) * params.cluster_n
    grid = model.TileGrid(
        tiles=round(expected_tiles(sizes, params.block_m)) * columns,
        k_tiles=-(-sizes.k * item // K_TILE_BYTES),
        cluster_m=1,
        cluster_n=params.cluster_n,
        split_k=1,
        out_bytes=out_item,
        dram_bytes=sizes.bytes_moved,
        operand_bytes=(sizes.places * sizes.k * item, sizes.groups * sizes.n * sizes.k * item),
    )
    tile = model.CtaTile(params.block_m, params.block_n, is_pingpong=params.gemm.is_pingpong)
    cost = model.tile_cost(gpu, sizes.dtype, grid, tile)
    chunks = params.gemm.consumer_rows * params.block_n // MMA_TILE_ROWS**2
    free = gpu.smem_per_block_optin_bytes - params.smem_bytes(sizes) + params.consumers * MMA_TILE_ROWS**2 * 2
    pipeline = model.Pipeline(params.stages, grouped_epilogue_buffers(chunks, params.consumers, free))
    schedule = "pingpong" if params.gemm.is_pingpong else "cooperative"
    tiles = model.tiles_secs(gpu, cost, pipeline) + cost.sm_tiles * TILE_SECS[schedule]
    return tiles * CLUSTER_FACTORS[schedule][params.cluster_n] + model.launch_secs(gpu, has_pdl=True) + TABLES_SECS
