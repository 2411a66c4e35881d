"""Owns which tiles of a grouped GEMM a GPU should try, on mma.sync or else on CUDA cores, and in which order.

Knows nothing of TVM or of how the template applies them. Sizes of groups are known at run time alone: tiles are counted for groups of equal
expectation, whose last tile is half full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.matmul_grouped import GroupedSizes, MmaGroupedParams, expected_tiles, grouped_of, mma_k_tile, mma_takes
from kerneldecl.analysis.matmul_grouped_simt import K_TILE, VECTOR, SimtGroupedParams, simt_takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu import time_model as model

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
TENSOR_SHARE = 0.6
"""Part of the data sheet's rate that mma.sync reaches. Assumed: no kernel has been timed yet."""
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
"""Part of the data sheet's rate that CUDA cores reach. Assumed: no kernel has been timed yet."""
COPY_INSTRUCTIONS = 4
"""Instructions of an element that a thread copies: a store and a conversion, and its part of the load with its address and bounds."""
BROADCASTS = 2
"""Threads of a warp that read the same elements of shared memory at once, about."""


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
    """Return the predicted time of as many tiles: tensor cores, L2, DRAM, and the waits of a thread block's k-tiles."""
    item = dtype_bytes(sizes.dtype)
    tiles = round(expected_tiles(sizes, params.block_m)) * -(-sizes.n // params.block_n)
    k_tile = mma_k_tile(sizes)
    k_tiles = -(-sizes.k // k_tile)
    read_rows = params.block_m * params.block_n * sum(1 / extent for extent in params.warp_tile)
    work = model.Work(
        blocks=tiles,
        threads=params.threads,
        regs_per_thread=params.registers(sizes),
        smem_bytes=params.smem_bytes(sizes),
        flops=2.0 * tiles * params.block_m * params.block_n * k_tiles * k_tile,
        flops_per_s=gpu.tensor_rate(sizes.dtype) * TENSOR_SHARE,
        dram_bytes=sizes.bytes_moved,
        l2_bytes=tiles * k_tiles * k_tile * (params.block_m + params.block_n) * item,
        moved_smem_bytes=tiles * k_tiles * k_tile * item * read_rows,
        rounds=1 + k_tiles / (params.stages - 1),
        barriers=k_tiles,
    )
    return model.predicted_secs(gpu, work)


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
