"""Owns which persistent kernels of a GEMM of few rows with packed 4-bit weights a GPU should try, and how long each is predicted to take.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import FIRST_CLUSTER_CAPABILITY, FIRST_PDL_CAPABILITY, SM_PARTITIONS
from kerneldecl.analysis.matmul_packed import BARRIER_BYTES, PackedSizes
from kerneldecl.analysis.matmul_packed_persistent import MAX_PERSISTENT_STAGES, STEPS, TILES, PersistentParams
from kerneldecl.analysis.packed_weights import TILE_K, TILE_ROWS
from kerneldecl.model import Gpu
from kerneldecl.policies.gpu.gemm_tiles import Estimate
from kerneldecl.policies.gpu.tensor_core_model import multiplies_per_cycle
from kerneldecl.policies.gpu.time_model import BARRIER_SECS, COMBINE_SECS, DRAM_SHARE, SM_BYTES_PER_CLOCK, occupancy, p_norm
from kerneldecl.policies.hopper import time_model as model

WARPS = (4, 8, 16)
MANY_WARPS = 16
SPLIT_K = (1, 2, 4, 8)
MIN_TURNS = 2
"""Tiles of a thread block at least: with one there is nothing that activations in registers would be kept for."""
FEW_BYTES = 1 << 16
"""Bytes of partial results up to which those of all tiles wait for the end."""
COPIES = (
    (0, 0, 0, 1.0, 0),
    (0, 2, 1, 1.0, 0),
    (1, 2, 1, 1.0, 0),
    (0, 2, 0, 0.4, 0),
    (1, 0, 1, 0.6, 0),
    (1, 1, 0, 0.35, 0),
    (1, 1, 0, 0.35, 1),
)
"""Values of `bulk`, `prefetch` and `cover`, the part of shared memory that stages take, and `interleave`: each with some values of the
others. Two stages of 2 KB took 10.6 us, and 11.6 behind a foreign kernel, where six took 10.9 and 13.1 (1 x 8192 x 8192; H200, 2026-11).
Interleaved steps took 0.01 to 0.07 us longer (three pairs)."""
PLAIN_COPIES = ((0, 0, 0, 1.0, 0), (0, 0, 1, 0.6, 0))
"""The same for GPUs without bulk copies and PDL."""
SAME_TILE = 4
"""Proposals of one tile at most; see `gemm_tiles.best_first`."""

# Instructions of a warp, counted in what nvcc 13.0 makes of the kernel for sm_90a.

STEP_INSTRUCTIONS, BULK_STEP_INSTRUCTIONS = 47.0, 67.0
"""For a step: the loop, addresses, copies."""
TILE_INSTRUCTIONS = 21.0
"""For 16 rows and 64 elements along k: 16 registers of fragments, each a logic operation, a shift for four, and the load of all."""
FLOAT4_TILE_INSTRUCTIONS = 66.0
"""The same of float4_e2m1fn: 51 for float16, 66 for bfloat16, as in `gpu_matmul_packed`."""
RUN_INSTRUCTIONS = 8.0
"""For the scales of 16 rows that a step has along k."""
LOAD_INSTRUCTIONS = 3.0
"""For 16 elements along k of eight rows of activations, once: half an ldmatrix, an MMA that adds them up, copies."""
ISSUE_SHARE = 0.8
"""Part of an SM's cycles in which its schedulers find an instruction to issue. Assumed."""
MMA_CYCLES = 33.0
"""Cycles for which an MMA waits for the one before it. Assumed."""
WARP_CYCLES = 2.0
"""Cycles between instructions of one warp. Assumed: code of a step is unrolled, so that more of it is independent than in a loop."""
FEW_WARPS_SECS = 0.4e-6
"""Seconds that each halving of the warps below sixteen costs. Less than measured with `gpu_matmul_packed`: half as many warps along k took
2 to 3.5 us longer (1 and 16 x 8192 x 8192; H200, 2026-11), but had long steps."""
LOAD_LATENCY_SECS = 0.6e-6
"""Seconds from a copy to its arrival, while all SMs load: with two stages, 16 warps took no longer than with four (six pairs of kernels of
1 x 8192 x 8192; H200, 2026-11)."""
START_SECS = 0.4e-6
"""Seconds from the start of thread blocks to the first arrivals: 18 kernels of 1 x 8192 x 8192 (H200, 2026-11), as STAGE_SECS and
PREFETCHED_SECS."""
STAGE_SECS = 0.15e-6
"""Seconds that each stage over the first two costs: six stages of 2 KB took 11.9 us, 13 of 1 KB 13.7."""
PREFETCHED_SECS = 0.45e-6
"""Seconds that L2 prefetch saves back to back: four pairs of kernels."""
ACTIVATION_BYTES_PER_CLOCK = 12.0
"""Rate at which activations come to a thread block that all others ask for at the same time, and that waits for them: 64 and 128 KB a block
took about 3 and 6 us longer than 16 (1, 8 and 16 x 8192 x 8192, 28 kernels; H200, 2026-11)."""
INTERLEAVED_SECS = 0.01e-6
"""Seconds that interleaved steps cost: 0.01 to 0.07 us of three pairs of kernels."""
BULK_SECS = 0.05e-6
"""Seconds that bulk copies of half a kilobyte cost. Assumed."""
CLUSTER_SHARE = 1.5
"""Multiple of what clusters of GEMMs on wgmma wait for each other: one row took 12.2 and 12.6 us with split-K of two, 11.2 to 11.7 without
(1 x 8192 x 8192; H200, 2026-11)."""
CROWDED_SECS = 2.5e-6
"""Seconds that PDL costs where an SM has room for a thread block of the next kernel beside its own: see `gpu_matmul_packed`."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap. Assumed."""


def estimates(sizes: PackedSizes, gpu: Gpu, moved: int) -> Iterator[Estimate]:
    """Yield the search space with predicted times; `moved` are the bytes that must come from DRAM."""
    for params in choices(sizes, gpu):
        yield Estimate(params, _secs(sizes, params, gpu, moved), _tile(params))


def _tile(params: PersistentParams) -> tuple[int, ...]:
    """Return what decides how activations are divided and in which steps weights come."""
    return params.rows, params.step, params.warps, params.split_k


def choices(sizes: PackedSizes, gpu: Gpu) -> Iterator[PersistentParams]:
    """Yield the search space: thread blocks that an SM each has room for, with as many stages as fit, or some fewer."""
    has_clusters = gpu.compute_capability >= FIRST_CLUSTER_CAPABILITY
    copies, splits = (COPIES, SPLIT_K) if has_clusters else (PLAIN_COPIES, SPLIT_K[:1])
    steps = [step for step in STEPS if sizes.k % step == 0]
    for rows, step, warps, split_k in itertools.product(TILES, steps[-2:], WARPS, splits):
        clusters = model.resident_clusters(gpu, split_k) if split_k > 1 else gpu.sm_count
        row_tiles = -(-sizes.n // rows)
        turns = -(-row_tiles // clusters)
        base = PersistentParams(rows, step, warps, turns, 2, turns, split_k)
        if turns < MIN_TURNS or warps * split_k > base.steps(sizes):
            continue
        copied = itertools.product(_held(sizes, base), copies)
        found = dict.fromkeys(_with_copies(sizes, base._replace(held=held), gpu, each) for held, each in copied)
        yield from (params for params in found if params.fits(sizes, gpu))


def _with_copies(sizes: PackedSizes, base: PersistentParams, gpu: Gpu, copies: tuple[int, int, int, float, int]) -> PersistentParams:
    """Return the parameters with one of COPIES; `cover` is 0 where there is nothing to cover."""
    bulk, prefetch, cover, part, interleave = copies
    tile = base._replace(bulk=bulk, prefetch=prefetch, interleave=interleave)
    plain = tile._replace(stages=_stages(sizes, tile, gpu, part))
    covering = plain._replace(cover=cover)
    return covering if covering.fits(sizes, gpu) else plain


def _held(sizes: PackedSizes, base: PersistentParams) -> list[int]:
    """Return of how many tiles partial results may be held: all if these are few bytes, else one or two."""
    return [base.tiles] if base.sum_bytes(sizes) <= FEW_BYTES else [held for held in (1, 2) if held < base.tiles]


def _stages(sizes: PackedSizes, tile: PersistentParams, gpu: Gpu, part: float) -> int:
    """Return the stages of a part of shared memory, and no more than a warp has steps."""
    left = part * gpu.smem_per_block_optin_bytes - tile.sum_bytes(sizes) - tile.round_bytes(sizes)
    fitting = int(left) // (tile.warps * (tile.stage_bytes(sizes) + BARRIER_BYTES))
    return min(fitting, MAX_PERSISTENT_STAGES, tile.tiles * tile.slice_steps(sizes) + 1)


def _secs(sizes: PackedSizes, params: PersistentParams, gpu: Gpu, moved: int) -> float:
    """Return a p-norm of the times of DRAM, L2, an SM's copies, schedulers and tensor cores, a warp by itself, and copies' latency."""
    resident = occupancy(gpu, params.threads, params.registers(sizes), params.smem_bytes(sizes))
    if not resident:
        return float("inf")
    blocks, cycle = params.blocks(sizes) * params.split_k, 1 / gpu.clock_hz
    warp_steps = params.tiles * params.slice_steps(sizes)
    block_steps, instructions = params.warps * warp_steps, _instructions(sizes, params)
    activation_bytes = params.warps * params.activation_bytes(sizes)
    block_bytes = block_steps * params.stage_bytes(sizes) + activation_bytes
    multiplies = params.rows * params.step * sizes.fragments * 8
    loading = LOAD_INSTRUCTIONS * params.slice_steps(sizes) * params.step / 16 * sizes.fragments
    issued = params.warps * (warp_steps * instructions + loading)
    chained = params.step / 16 * MMA_CYCLES / (params.rows // TILE_ROWS * sizes.fragments)
    times = (
        moved / (gpu.dram_bytes_per_s * DRAM_SHARE),
        blocks * block_bytes / gpu.l2_bytes_per_s,
        block_bytes / SM_BYTES_PER_CLOCK * cycle,
        issued / (SM_PARTITIONS * ISSUE_SHARE) * cycle,
        block_steps * multiplies / multiplies_per_cycle(gpu, "float16", "float32") * cycle,
        warp_steps * (chained + WARP_CYCLES * instructions) * cycle,
        warp_steps / (params.stages - 1) * LOAD_LATENCY_SECS,
    )
    # The last arrivals are multiplied alone.
    tail_secs = params.warps * instructions / (SM_PARTITIONS * ISSUE_SHARE) * cycle
    once = once_secs(sizes, params, gpu, has_room=resident > -(-blocks // gpu.sm_count))
    return p_norm(*times, exponent=OVERLAP) + tail_secs + _activation_secs(sizes, params, gpu) + once


def _instructions(sizes: PackedSizes, params: PersistentParams) -> float:
    """Return the instructions of a warp for a step."""
    row_tiles, k_tiles = params.rows // TILE_ROWS, params.step // TILE_K
    step = BULK_STEP_INSTRUCTIONS if params.bulk else STEP_INSTRUCTIONS
    values = FLOAT4_TILE_INSTRUCTIONS if sizes.is_float4 else TILE_INSTRUCTIONS
    run = RUN_INSTRUCTIONS + (4 if sizes.is_float4 else 8) * sizes.fragments
    return step + row_tiles * (k_tiles * (values + 4 * sizes.fragments) + params.step_scales(sizes) * run)


def _activation_secs(sizes: PackedSizes, params: PersistentParams, gpu: Gpu) -> float:
    """Return how long a thread block waits for its activations, for which weights leave stages free."""
    return params.warps * params.activation_bytes(sizes) / ACTIVATION_BYTES_PER_CLOCK / gpu.clock_hz


def once_secs(sizes: PackedSizes, params: PersistentParams, gpu: Gpu, *, has_room: bool) -> float:
    """Return the seconds that a kernel takes once: its launch, the first arrivals, the sums over warps and thread blocks."""
    has_pdl = gpu.compute_capability >= FIRST_PDL_CAPABILITY
    secs = model.launch_secs(gpu, has_pdl=has_pdl) + (CROWDED_SECS if has_pdl and has_room else 0.0)
    # Those of rounds before the last one are added up while weights come.
    partial_bytes = 2 * params.warps * params.held * params.tile_bytes(sizes)
    secs += START_SECS + COMBINE_SECS + BARRIER_SECS * -(-params.tiles // params.held)
    secs += partial_bytes / gpu.smem_bytes_per_clock_per_sm / gpu.clock_hz
    secs += FEW_WARPS_SECS * max(0.0, math.log2(MANY_WARPS / params.warps))
    secs += (
        BULK_SECS * params.bulk
        + INTERLEAVED_SECS * params.interleave
        + STAGE_SECS * (params.stages - 2)
        - (PREFETCHED_SECS if params.prefetch else 0.0)
    )
    return secs + (CLUSTER_SHARE * model.CLUSTER_SECS + model.SPLIT_K_CTA_SECS * (params.split_k - 1) if params.split_k > 1 else 0.0)
