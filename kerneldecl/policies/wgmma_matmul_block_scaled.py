"""Owns which tiles, clusters and split-K of a float8 GEMM with block scales on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis.block_scales import BLOCK, DTYPES
from kerneldecl.analysis.contraction import contraction_of
from kerneldecl.analysis.hopper_limits import MAX_STAGES, MMA_TILE_ROWS, RESERVED_SMEM_BYTES, WARPGROUP_THREADS
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.gpu.tensor_core_model import SUSTAINED_CLOCK
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, p_norm
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.epilogue_smem import epilogue_smem_bytes
from kerneldecl.policies.hopper.split_k import split_k_choices, workspace_choices
from kerneldecl.policies.hopper.tile_widths import N_UNIT
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATE = "wgmma_matmul_block_scaled"
TEMPLATES = (TEMPLATE,)
AUTO = {"cuda": 6}
HAS_TRACES = False

TILES = ((128, 2, 1), (128, 2, 2), (192, 3, 1), (64, 1, 1), (64, 1, 2))
"""Values of `block_m`, `consumers` and `partials`."""
BLOCK_N = (32, 64, 128)
CLUSTERS = ((1, 1), (2, 1), (1, 2), (4, 1))
"""Values of `cluster_m` and `cluster_n`."""
RASTER_GROUPS = (8, 16)
MIN_STAGES = 3
SAME_TILE = 2
"""Proposals of one tile at most; see `gemm_tiles.best_first`."""
ALIGN = 16
"""Bytes of which TMA's rows are multiples."""
MMA_ELEMENTS_PER_CYCLE = 4096.0
"""Multiply-adds of 8 bits that an SM's tensor cores start in a cycle (H100 whitepaper)."""
SCALE_CYCLES = 150.0
"""Cycles of a consumer to wait for a k-tile of 64 accumulators of a thread and to add them, scaled. Assumed."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap. Assumed."""


class Tiling(NamedTuple):
    """The parameters of template `wgmma_matmul_block_scaled`."""

    block_m: int
    block_n: int
    consumers: int
    partials: int
    stages: int = MIN_STAGES
    cluster_m: int = 1
    cluster_n: int = 1
    raster_group: int = RASTER_GROUPS[0]
    split_k: int = 1
    workspace: int = 0
    pdl: int = 0

    def candidate(self) -> Candidate:
        return Candidate.of(TEMPLATE, self._asdict())


class Problem(NamedTuple):
    """What all tilings of one GEMM share."""

    m: int
    n: int
    k: int
    out_bytes: int
    moved_bytes: int


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for other computations than a GEMM with block scales."""
    problem, gpu = problem_of(space, arch.the_gpu), arch.the_gpu
    if problem is None:
        return ()
    return tuple(itertools.islice(best_first((_estimate(problem, tiling, gpu) for tiling in tilings(problem, gpu)), SAME_TILE), top_k))


def problem_of(space: IterSpace, gpu: Gpu) -> Problem | None:
    """Return the sizes of what looks like the template's computation, None where it does not; the template reads it in full."""
    gemm = contraction_of(space)
    if isinstance(gemm, str) or not gpu.wgmma_arch or not gemm.is_plain or len(space.blocks) < len(("values", "scales", "sums")):
        return None
    _, m, n, k = gemm.extents
    read = {(access.dtype, access.shape) for block in space.blocks[:2] if not block.is_reduction for access in block.reads}
    scales = {("float32", (k // BLOCK, m)), ("float32", (-(-n // BLOCK), k // BLOCK))}
    values = read - scales
    dtypes = {dtype for dtype, _ in values}
    is_scaled = scales <= read and {shape for _, shape in values} == {(m, k), (n, k)} and len(dtypes) == 1 and dtypes <= {*DTYPES}
    if not is_scaled or k % BLOCK or m * dtype_bytes("float32") % ALIGN:
        return None
    return Problem(m, n, k, dtype_bytes(space.blocks[-1].writes[0].dtype), moved_bytes(space))


def tilings(problem: Problem, gpu: Gpu) -> Iterator[Tiling]:
    """Yield the search space: tiles in clusters or with split-K, with as many stages as fit."""
    k_tiles = problem.k // BLOCK
    for (block_m, consumers, partials), block_n in itertools.product(TILES, BLOCK_N):
        if block_m - MMA_TILE_ROWS >= problem.m and block_m > MMA_TILE_ROWS:
            continue
        tile = Tiling(block_m=block_m, block_n=block_n, consumers=consumers, partials=partials)
        rows, columns = -(-problem.m // block_m), -(-problem.n // block_n)
        divided = [
            tile._replace(cluster_m=cluster_m, cluster_n=cluster_n, raster_group=group)
            for (cluster_m, cluster_n), group in itertools.product(CLUSTERS, RASTER_GROUPS)
            if cluster_m <= rows and cluster_n <= columns and block_n % (N_UNIT * cluster_m) == 0 and block_m % (N_UNIT * cluster_n) == 0
        ]
        divided += [tile._replace(split_k=parts) for parts in split_k_choices(gpu, rows * columns, k_tiles)]
        divided += [tile._replace(split_k=parts, workspace=1) for parts in workspace_choices(gpu, rows * columns, k_tiles)]
        for each in divided:
            stages = min(MAX_STAGES, -(-k_tiles // each.split_k) + 1, _fitting_stages(problem, each, gpu))
            if stages >= MIN_STAGES:
                yield from (each._replace(stages=stages, pdl=pdl) for pdl in (0, 1))


def _fitting_stages(problem: Problem, tiling: Tiling, gpu: Gpu) -> int:
    split_k, out_bytes = (1 if tiling.workspace else tiling.split_k), problem.out_bytes if tiling.split_k == 1 else 4
    accumulators = MMA_TILE_ROWS * tiling.block_n // WARPGROUP_THREADS
    other = RESERVED_SMEM_BYTES + epilogue_smem_bytes(accumulators, tiling.consumers, split_k, out_bytes)
    return (gpu.smem_per_block_optin_bytes - other) // _stage_bytes(tiling)


def _stage_bytes(tiling: Tiling) -> int:
    return (tiling.block_m + tiling.block_n) * BLOCK + tiling.block_m * 4


def _estimate(problem: Problem, tiling: Tiling, gpu: Gpu) -> Estimate:
    kind = (tiling.block_m, tiling.block_n, tiling.partials, tiling.cluster_m, tiling.cluster_n, tiling.split_k, tiling.workspace)
    return Estimate(tiling, _secs(problem, tiling, gpu), kind)


def _secs(problem: Problem, tiling: Tiling, gpu: Gpu) -> float:
    """Return a p-norm of the times of DRAM, of L2, of an SM's tensor cores, of a consumer by itself and of loads' latency."""
    tiles = -(-problem.m // tiling.block_m) * -(-problem.n // tiling.block_n)
    k_tiles, cycle = -(-problem.k // (BLOCK * tiling.split_k)), 1 / (gpu.clock_hz * SUSTAINED_CLOCK)
    turns = math.ceil(tiles * tiling.split_k / gpu.sm_count) * k_tiles
    mma_cycles = MMA_TILE_ROWS * tiling.block_n * BLOCK / MMA_ELEMENTS_PER_CYCLE
    scale_cycles = SCALE_CYCLES * tiling.block_n / BLOCK / tiling.partials
    loaded = tiles * tiling.split_k * k_tiles * BLOCK * (tiling.block_m / tiling.cluster_n + tiling.block_n / tiling.cluster_m)
    times = (
        problem.moved_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE),
        loaded / gpu.l2_bytes_per_s,
        turns * tiling.consumers * mma_cycles * cycle,
        turns * (2 * mma_cycles + scale_cycles) * cycle,
        turns * model.LOAD_LATENCY_SECS / (tiling.stages - 1),
    )
    return p_norm(*times, exponent=OVERLAP) + _once_secs(tiling, gpu, tiles)


def _once_secs(tiling: Tiling, gpu: Gpu, tiles: int) -> float:
    """Return the seconds that a kernel takes once: its launch, the first loads, the reduction of split-K."""
    secs = model.launch_secs(gpu, has_pdl=bool(tiling.pdl)) + model.PROLOGUE_SECS + tiling.stages * model.STAGE_FILL_SECS
    if tiling.workspace:
        moved = 2 * tiles * tiling.split_k * tiling.block_m * tiling.block_n * 4
        return secs + model.launch_secs(gpu, has_pdl=True) + model.WORKSPACE_SECS + moved / gpu.l2_bytes_per_s
    if tiling.split_k * tiling.cluster_m * tiling.cluster_n > 1:
        return secs + model.CLUSTER_SECS + model.SPLIT_K_CTA_SECS * (tiling.split_k - 1)
    return secs
