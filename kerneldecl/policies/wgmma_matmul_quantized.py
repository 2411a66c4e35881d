"""Owns which tiles, split-K and stages of a GEMM with packed 4-bit weights on wgmma a GPU should try, and in which order.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from kerneldecl.analysis.contraction import contraction_of
from kerneldecl.analysis.hopper_limits import (
    MAX_STAGES,
    MAX_WORKSPACE_SPLIT_K,
    MMA_TILE_ROWS,
    RESERVED_SMEM_BYTES,
    TMA_SMEM_ALIGN_BYTES,
    WARPGROUP_THREADS,
)
from kerneldecl.analysis.matmul_packed import packed_of
from kerneldecl.analysis.packed_weights import TILE_K
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, p_norm
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.hopper.epilogue_smem import epilogue_smem_bytes
from kerneldecl.policies.hopper.operands import why_no_wgmma
from kerneldecl.policies.hopper.split_k import MIN_WORKSPACE_K_TILES, split_k_choices, workspace_choices
from kerneldecl.policies.hopper.tile_widths import N_UNIT, block_n_choices
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATE = "wgmma_matmul_quantized"
TEMPLATES = (TEMPLATE,)
KINDS = ("cuda",)
HAS_TRACES = False

TILES = ((64, 1), (128, 1), (128, 2), (256, 2), (192, 3), (256, 4))
"""Values of `block_m` and `consumers`."""
BLOCK_K = (TILE_K, 2 * TILE_K)
MAX_ACCUMULATORS = {1: 128, 2: 128, 3: 64, 4: 32}
"""Accumulators of a thread at most, by consumers: beside them are two sets of registers for dequantised weights."""
MAX_WORKSPACE_ACCUMULATORS = 96
"""Accumulators of a thread at most where CTAs share k by a workspace and groups have 16 weights: with 128, their scales' registers spill
(nvcc 13.0)."""
CLUSTERS = (1, 2, 4)
"""CTAs of a cluster that share activations by TMA multicast, without split-K of a cluster."""
MIN_STAGES = 3
"""Stages at least: one is dequantised while the one before is multiplied."""
RESIDENT = (1, 2, 3, 4)
"""CTAs that share an SM, for which stages are chosen so that they fit."""
RASTER_GROUP = 8
SAME_TILE = 2
"""Proposals of one tile at most; see `gemm_tiles.best_first`."""
OTHER_REGISTERS = 68
"""Registers of a thread besides accumulators, without setmaxnreg (nvcc 13.0)."""
DEQUANTISE_CYCLES = 80.0
"""Instructions of a warp for a k-tile of its 16 rows: about 20 for each 16 elements along k, as nvcc compiles them."""
FLOAT4_DEQUANTISE_CYCLES = 170.0
"""The same for float4_e2m1fn: 140 to 200, by the dtypes of operands and scales."""
K_TILE_CYCLES = 250.0
"""Cycles of a consumer for a k-tile besides: barriers, loads from shared memory, the first of its MMAs. Assumed."""
FRAGMENT_CYCLES = 28.0
"""Cycles of tensor cores for an MMA of 64 rows besides its multiply-adds, where operand A comes from registers. Six
kernels of 1 to 256 rows by 8192 x 8192, which took 14.1 to 51.0 us, are predicted within 8 % with it (H200, 2026-11)."""
MMA_K = 16
"""Elements along k of an MMA."""
MMA_ELEMENTS_PER_CYCLE = 2048.0
"""Multiply-adds of 16 bits that an SM's tensor cores start in a cycle (H100 whitepaper)."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap. Assumed."""


class Tiling(NamedTuple):
    """The parameters of template `wgmma_matmul_quantized`."""

    block_m: int
    block_n: int
    block_k: int
    consumers: int
    stages: int = MIN_STAGES
    cluster_m: int = 1
    raster_group: int = RASTER_GROUP
    split_k: int = 1
    workspace: int = 0
    pdl: int = 0

    @property
    def consumer_rows(self) -> int:
        return self.block_m // self.consumers

    @property
    def thread_accumulators(self) -> int:
        return self.consumer_rows * self.block_n // WARPGROUP_THREADS

    def candidate(self) -> Candidate:
        return Candidate.of(TEMPLATE, self._asdict())


class Problem(NamedTuple):
    """What all tilings of one GEMM share."""

    m: int
    n: int
    k: int
    group: int
    """Weights along k that share a scale."""
    factor_bytes: int
    """Bytes of a scale and of its zero point, if it has one."""
    out_bytes: int
    moved_bytes: int
    dequantise_cycles: float
    """Instructions of a warp for 16 rows and 64 elements along k."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the tilings with the least predicted time, best first; nothing for other computations than a GEMM with packed weights."""
    problem, gpu = problem_of(space, arch), arch.the_gpu
    if problem is None:
        return ()
    return tuple(itertools.islice(best_first((_estimate(problem, tiling, gpu) for tiling in tilings(problem, gpu)), SAME_TILE), top_k))


def problem_of(space: IterSpace, arch: Arch) -> Problem | None:
    """Return the sizes of what looks like the template's computation, None where it does not; the template reads it in full."""
    gemm, sizes = contraction_of(space), packed_of(space)
    if sizes is None or isinstance(gemm, str) or why_no_wgmma(gemm, arch.the_gpu):
        return None
    cycles = FLOAT4_DEQUANTISE_CYCLES if sizes.is_float4 else DEQUANTISE_CYCLES
    out_bytes = dtype_bytes(space.blocks[-1].writes[0].dtype)
    return Problem(sizes.m, sizes.n, sizes.k, sizes.group, sizes.factor_bytes, out_bytes, moved_bytes(space), cycles)


def tilings(problem: Problem, gpu: Gpu) -> Iterator[Tiling]:
    """Yield the search space: tiles with split-K, and stages with which so many CTAs share an SM."""
    is_skinny = problem.m <= 2 * MMA_TILE_ROWS
    widths = block_n_choices(problem.m, "float16", is_skinny=is_skinny)
    for (block_m, consumers), block_n, block_k in itertools.product(TILES, widths, BLOCK_K):
        tile = Tiling(block_m=block_m, block_n=block_n, block_k=block_k, consumers=consumers)
        is_too_tall = block_m - MMA_TILE_ROWS >= problem.n
        if tile.thread_accumulators > MAX_ACCUMULATORS[consumers] or is_too_tall or problem.k % block_k:
            continue
        tiles, k_tiles = _tile_count(problem, tile), problem.k // block_k
        clusters = [ctas for ctas in CLUSTERS if ctas <= -(-problem.n // block_m) and block_n % (N_UNIT * ctas) == 0]
        divided = [tile._replace(cluster_m=ctas) for ctas in clusters]
        divided += [tile._replace(split_k=parts) for parts in split_k_choices(gpu, tiles, k_tiles)]
        parts_of_two = -(-k_tiles // -(-k_tiles // max(1, min(2 * gpu.sm_count // tiles, k_tiles // MIN_WORKSPACE_K_TILES))))
        workspaces = {*workspace_choices(gpu, tiles, k_tiles), *([parts_of_two] if 1 < parts_of_two <= MAX_WORKSPACE_SPLIT_K else [])}
        if problem.group >= 32 or tile.thread_accumulators <= MAX_WORKSPACE_ACCUMULATORS:
            divided += [tile._replace(split_k=parts, workspace=1) for parts in sorted(workspaces)]
        for each in divided:
            yield from _with_stages(problem, each._replace(pdl=1), gpu)


def _with_stages(problem: Problem, tiling: Tiling, gpu: Gpu) -> Iterator[Tiling]:
    """Yield a tiling with each number of stages with which as many CTAs as an SM has to take share it, or fewer.

    No more: GPUs put the CTAs of clusters on as few SMs as hold them. 128 clusters of two took 18.2 us where three CTAs fitted an SM, and
    14.7 with a stage more, where two did (H200, 2026-11).
    """
    other, stage = _other_smem_bytes(problem, tiling), _stage_bytes(problem, tiling)
    found = set()
    needed = -(-_tile_count(problem, tiling) * tiling.split_k // gpu.sm_count)
    for resident in RESIDENT[: min(needed, _resident_by_registers(tiling, gpu))]:
        limit = min(gpu.smem_per_block_optin_bytes, gpu.smem_per_sm_bytes // resident - gpu.smem_reserved_per_block_bytes)
        found.add(min(MAX_STAGES, _cta_k_tiles(problem, tiling) + 1, (limit - other) // stage))
    yield from (tiling._replace(stages=stages) for stages in sorted(found) if stages >= MIN_STAGES)


def _stage_bytes(problem: Problem, tiling: Tiling) -> int:
    return _a_bytes(problem, tiling) + tiling.block_n * 2 * tiling.block_k + TMA_SMEM_ALIGN_BYTES


def _a_bytes(problem: Problem, tiling: Tiling) -> int:
    """Return the bytes of a k-tile's weights with their scales and zero points."""
    return tiling.block_m * (tiling.block_k // 2 + problem.factor_bytes * max(1, tiling.block_k // problem.group))


def _other_smem_bytes(problem: Problem, tiling: Tiling) -> int:
    split_k = 1 if tiling.workspace else tiling.split_k
    out_bytes = problem.out_bytes if tiling.split_k == 1 else 4
    return RESERVED_SMEM_BYTES + epilogue_smem_bytes(tiling.thread_accumulators, tiling.consumers, split_k, out_bytes)


def _resident_by_registers(tiling: Tiling, gpu: Gpu) -> int:
    """Return how many CTAs an SM's registers hold."""
    threads = (tiling.consumers + 1) * WARPGROUP_THREADS
    registers = OTHER_REGISTERS + tiling.thread_accumulators + 16 * (tiling.consumer_rows // MMA_TILE_ROWS - 1)
    return max(1, gpu.registers_per_sm // (threads * registers))


def _tile_count(problem: Problem, tiling: Tiling) -> int:
    return -(-problem.n // tiling.block_m) * -(-problem.m // tiling.block_n)


def _cta_k_tiles(problem: Problem, tiling: Tiling) -> int:
    return -(-problem.k // (tiling.block_k * tiling.split_k))


def _estimate(problem: Problem, tiling: Tiling, gpu: Gpu) -> Estimate:
    tile = (tiling.block_m, tiling.block_n, tiling.block_k, tiling.consumers, tiling.cluster_m, tiling.split_k, tiling.workspace)
    return Estimate(tiling, _secs(problem, tiling, gpu), tile)


def _secs(problem: Problem, tiling: Tiling, gpu: Gpu) -> float:
    """Return a p-norm of the times of DRAM, of L2, of an SM's tensor cores and schedulers, of consumers' latency and of loads' latency."""
    tiles, k_tiles = _tile_count(problem, tiling), _cta_k_tiles(problem, tiling)
    smem_bytes = _other_smem_bytes(problem, tiling) + tiling.stages * _stage_bytes(problem, tiling)
    fitting = gpu.smem_per_sm_bytes // (smem_bytes + gpu.smem_reserved_per_block_bytes)
    resident = max(1, min(fitting, _resident_by_registers(tiling, gpu)))
    cluster = tiling.cluster_m * (1 if tiling.workspace else tiling.split_k)
    waves = -(-tiles * tiling.split_k // (cluster * resident * model.resident_clusters(gpu, cluster)))
    needed = -(-tiles * tiling.split_k // gpu.sm_count)
    is_packed = cluster > 1 and resident > needed
    ctas = waves * min(resident, needed) if waves > 1 else resident if is_packed else needed
    mma_tiles, cycle = tiling.consumer_rows // MMA_TILE_ROWS, 1 / gpu.clock_hz
    mma_cycles = tiling.block_k / MMA_K * (FRAGMENT_CYCLES + MMA_TILE_ROWS * tiling.block_n * MMA_K / MMA_ELEMENTS_PER_CYCLE)
    dequantise_cycles = problem.dequantise_cycles * tiling.block_k / TILE_K
    rows_cycles = max(dequantise_cycles, mma_cycles)
    turns = waves * k_tiles
    latency = K_TILE_CYCLES + mma_tiles * (dequantise_cycles + mma_cycles)
    stage_bytes = _a_bytes(problem, tiling) + tiling.block_n * 2 * tiling.block_k / tiling.cluster_m
    loaded = tiles * tiling.split_k * k_tiles * stage_bytes
    times = (
        problem.moved_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE),
        loaded / gpu.l2_bytes_per_s,
        ctas * k_tiles * tiling.block_m / MMA_TILE_ROWS * rows_cycles * cycle,
        turns * latency * cycle,
        turns * model.LOAD_LATENCY_SECS / (tiling.stages - 1),
    )
    return p_norm(*times, exponent=OVERLAP) + _once_secs(tiling, gpu, tiles)


def _once_secs(tiling: Tiling, gpu: Gpu, tiles: int) -> float:
    """Return the seconds that a kernel takes once: its launch, the first loads, the reduction of split-K."""
    secs = model.launch_secs(gpu, has_pdl=bool(tiling.pdl)) + model.PROLOGUE_SECS + tiling.stages * model.STAGE_FILL_SECS
    if tiling.cluster_m > 1:
        secs += model.CLUSTER_SECS
    if tiling.workspace:
        moved = 2 * tiles * tiling.split_k * tiling.block_m * tiling.block_n * 4
        return secs + model.launch_secs(gpu, has_pdl=True) + model.WORKSPACE_SECS + moved / gpu.l2_bytes_per_s
    if tiling.split_k > 1:
        return secs + model.SPLIT_K_CLUSTER_SECS + model.SPLIT_K_CTA_SECS * (tiling.split_k - 1)
    return secs
