"""Owns which tiles of a grouped GEMM on mma.sync a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them. Sizes of groups are known at run time alone: tiles are counted for groups of equal
expectation, whose last tile is half full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.matmul_grouped import GroupedSizes, MmaGroupedParams, expected_tiles, grouped_of, mma_k_tile, mma_takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu import time_model as model

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
TENSOR_SHARE = 0.6
"""Part of the data sheet's rate that mma.sync reaches. Assumed: no kernel has been timed yet."""


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
