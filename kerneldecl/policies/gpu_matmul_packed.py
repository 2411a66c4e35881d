"""Owns which warps, stages and split-K of a GEMM of few rows with packed 4-bit weights on mma.sync a GPU should try, and in which order.

Knows nothing of TVM, of how the templates apply them, or of the persistent form and the GEMV but what they are predicted to take.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.gpu_limits import FIRST_CLUSTER_CAPABILITY, FIRST_PDL_CAPABILITY, SM_PARTITIONS, WARP_LANES
from kerneldecl.analysis.matmul_packed import (
    BARRIER_BYTES,
    BY_ROUNDS,
    BY_STEPS,
    FIRST_CAPABILITY,
    KEPT,
    MAX_STAGES,
    STREAMS,
    WARP_ROWS,
    PackedParams,
    PackedSizes,
    packed_of,
)
from kerneldecl.analysis.packed_weights import TILE_K, TILE_ROWS
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal
from kerneldecl.policies.gpu import packed_gemv, packed_persistent
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first, interleaved, least_secs
from kerneldecl.policies.gpu.tensor_core_model import multiplies_per_cycle
from kerneldecl.policies.gpu.time_model import (
    BARRIER_SECS,
    COMBINE_SECS,
    DRAM_LATENCY_SECS,
    DRAM_SHARE,
    SM_BYTES_PER_CLOCK,
    occupancy,
    p_norm,
)
from kerneldecl.policies.hopper import time_model as model
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATES = ("gpu_matmul_packed", "gpu_matmul_packed_persistent", "gpu_gemv_packed")
KINDS = ("cuda",)
HAS_TRACES = False

WARPS_N = (1, 2, 4, 8)
WARPS_K = (1, 2, 4, 8, 16)
SPLIT_K = (1, 2, 4, 8)
MIN_WARPS, MAX_WARPS = 4, 16
"""Warps of a thread block."""
MAX_FILLING_WARPS = 20
"""The same at most where thread blocks take as many rows as fill the GPU once."""
RESIDENT = (1, 2, 3, 4)
"""Thread blocks that share an SM, for which stages are chosen so that they fit."""
MIN_STAGES = 2
COPIES = ((1, 0), (1, 1), (0, 0))
"""Values of `bulk` and `prefetch`."""
KEPT_COPIES = ((1, 1),)
"""The same where each step of activations comes once: bulk copies of 8 and 16 x 8192 x 8192 took 0.6 us less with it (H200, 2026-11)."""
MIN_WARP_STEPS = 2
"""Steps of a warp at least."""
SAME_TILE = 2
"""Proposals of one tile at most; see `gemm_tiles.best_first`."""
OTHER_FORM_EVERY = 6
"""One in this many proposals of those two forms is of the one, persistent or not, that is predicted to be slower."""
GEMV_EVERY = 4
"""One in this many proposals is a GEMV, where these are predicted to be slower than other forms; else every second one is."""

# Instructions of a warp, counted in what nvcc 13.0 makes of the kernel for sm_90a.

STEP_INSTRUCTIONS, BULK_STEP_INSTRUCTIONS = 45.0, 70.0
"""For a step: the loop, addresses, copies."""
INT4_TILE_INSTRUCTIONS = 22.0
"""For 16 rows and 64 elements along k: 16 registers of fragments, each a logic operation, and a shift for four; bfloat16 takes a shift more
for two."""
FLOAT4_TILE_INSTRUCTIONS = 66.0
"""The same of float4_e2m1fn: 51 for float16, 66 for bfloat16, whose numbers take a product besides."""
SCALED_INSTRUCTIONS, SCALED_FLOAT4_INSTRUCTIONS = 45.5, 95.0
"""For the same where weights are scaled, besides."""
GROUP_INSTRUCTIONS = 8.0
"""For the scales and zero points of a group and 16 rows, where sums are scaled."""
STREAM_INSTRUCTIONS = 4.0
"""For a warp's copy of 512 bytes of activations that come with a step."""
STEP_LATENCY_CYCLES = 300.0
"""Cycles of a warp for a step besides its instructions: eight MMAs one after the other, and the first loads from shared memory. Assumed."""
WARP_CYCLES = 3.0
"""Cycles between instructions of one warp: with half as many warps along k kernels took 2 to 3.5 us longer (1 and 16 x 8192 x 8192; H200,
2026-11)."""
ISSUE_SHARE = 0.8
"""Part of an SM's cycles in which its schedulers find an instruction to issue. Assumed."""
SMEM_TILE_BYTES, SMEM_FRAGMENT_BYTES = 1024.0, 512.0
"""Bytes that a tile of weights is copied and read with, and bytes of an ldmatrix of four fragments."""

LOAD_LATENCY_SECS = 1.0e-6
"""Seconds from a copy to its arrival, while all SMs load. Assumed."""
KEPT_LATENCY_SECS = 0.5e-6
"""The same where activations stay, and only weights come all along: two stages were the fastest of 8 x 8192 x 8192 (H200, 2026-11)."""
CROWDED_SECS = 2.5e-6
"""Seconds that PDL costs where an SM has room for a thread block of the next kernel beside its own: such a kernel took 16.3 us back to back
and 13.5 us behind a foreign one, one that fills its SMs 12.3 us back to back (1 x 8192 x 8192, groups of 128; H200, 2026-11)."""
STAGE_SECS = 0.15e-6
"""Seconds that each stage over the first two costs. Less than measured: 2, 3 and 6 stages of 16, 16 and 8 warps took 11.4, 11.9 and 13.7 us
while each warp started the copies of all its stages at once (1 x 8192 x 8192, groups of 128; H200, 2026-11)."""
KEPT_STAGE_SECS = 0.3e-6
"""The same where activations stay: the first ones come behind the first weights of all stages. 2, 3 and 4 stages took 11.6, 12.0 and 12.6
us with 8 rows (8192 x 8192; H200, 2026-11)."""
START_SECS = 1.5e-6
"""Seconds from the first arrivals to a full stream, which warps with few long steps have late: eight kernels of 1, 8, 16 and 64 x 8192 x
8192 (H200, 2026-11), as the next one."""
START_ROWS = 1024
"""Rows of weights of all warps for which that is so: where activations come with steps, fewer rows come sooner. Assumed."""
ROUND_BYTES_PER_CLOCK = 30.0
"""Rate at which activations come in rounds, for which all warps of a thread block wait."""
KEPT_BYTES_PER_CLOCK = 12.0
"""Rate at which activations that stay come while weights do, as measured of persistent kernels: all thread blocks ask for the same ones."""
CLUSTER_BLOCK_SECS = 0.5e-6
"""Seconds that each thread block of a cluster beyond two costs: 8 and 16 x 8192 x 8192 with two, four and eight (H200, 2026-11)."""
PREFETCH_SECS = 0.02e-6
"""Seconds that each step of L2 prefetch costs. Much less than measured behind a foreign kernel, which it does not overlap: 1, 2 and 4 steps
took 13.4, 14.5 and 15.8 us; back to back 11.9, 11.9 and 12.6."""
OVERLAP = 4.0
"""Exponent of the p-norm of times that overlap. Assumed."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for other computations than a GEMM with packed weights."""
    return tuple(itertools.islice(proposals(space, arch), top_k))


def proposals(space: IterSpace, arch: Arch) -> Iterator[Proposal]:
    """Yield the parameters, those with the least predicted time first, but for every fourth, a GEMV, and every sixth other, of its form."""
    sizes, gpu = packed_of(space), arch.the_gpu
    if sizes is None or gpu.compute_capability < FIRST_CAPABILITY:
        return
    moved = moved_bytes(space)
    plain = (Estimate(params, _secs(sizes, params, gpu, moved), _tile(sizes, params, gpu)) for params in choices(sizes, gpu))
    persistent = packed_persistent.estimates(sizes, gpu, moved)
    forms = list(best_first(plain, SAME_TILE)), list(best_first(persistent, packed_persistent.SAME_TILE))
    first, rivals = sorted(forms, key=least_secs)
    gemms, gemvs = list(interleaved(first, rivals, every=OTHER_FORM_EVERY)), list(packed_gemv.proposals(sizes, gpu, moved))
    if least_secs(gemvs) < least_secs(gemms):
        yield from interleaved(gemvs, gemms, every=2)
    else:
        yield from interleaved(gemms, gemvs, every=GEMV_EVERY)


def _tile(sizes: PackedSizes, params: PackedParams, gpu: Gpu) -> tuple[int, ...]:
    """Return what decides how often operands are read, by how many thread blocks and how, and whether the next kernel's find room."""
    has_room = _has_room(sizes, params, gpu)
    return params.rows, params.warps_n, params.split_k, int(has_room), params.bulk, params.prefetch, int(params.keeps_steps)


def _has_room(sizes: PackedSizes, params: PackedParams, gpu: Gpu) -> bool:
    """Say whether an SM holds a thread block beside those that it gets of one kernel."""
    resident = occupancy(gpu, params.threads, params.registers(sizes), params.smem_bytes(sizes))
    return resident > -(-params.row_blocks(sizes) * params.split_k // gpu.sm_count)


def choices(sizes: PackedSizes, gpu: Gpu) -> Iterator[PackedParams]:
    """Yield the search space: for warps along n and k, stages with which so many thread blocks fit an SM, or one less, or the fewest."""
    copies = COPIES if gpu.compute_capability >= FIRST_CLUSTER_CAPABILITY else ((0, 0),)
    for tile in _tiles(sizes, gpu):
        for (bulk, prefetch), stages in itertools.product(KEPT_COPIES if tile.keeps_steps else copies, _stages(sizes, tile, gpu)):
            params = tile._replace(stages=stages, bulk=bulk, prefetch=prefetch)
            if params.fits(sizes, gpu):
                yield params


def _tiles(sizes: PackedSizes, gpu: Gpu) -> Iterator[PackedParams]:
    """Yield how warps divide rows and k, and how activations come, with the fewest stages."""
    for rows, warps_k, split_k, stream in itertools.product(WARP_ROWS, WARPS_K, SPLIT_K, STREAMS):
        base = PackedParams(rows, 1, warps_k, MIN_STAGES, split_k, stream)._replace(bulk=int(stream == KEPT))
        filling = _filling_warps(sizes, base, gpu) if base.keeps_steps else 1
        for warps_n in sorted({*WARPS_N, filling}):
            tile = base._replace(warps_n=warps_n)
            most = MAX_FILLING_WARPS if warps_n not in WARPS_N else MAX_WARPS
            is_too_short = warps_k * MIN_WARP_STEPS > tile.block_steps(sizes)
            is_by_steps = stream in (BY_ROUNDS, KEPT) and warps_n == 1
            if not is_too_short and not is_by_steps and MIN_WARPS <= warps_n * warps_k <= most and tile.fits(sizes, gpu):
                yield tile


def _filling_warps(sizes: PackedSizes, base: PackedParams, gpu: Gpu) -> int:
    """Return the warps along n with which all rows of weights have a thread block, or a cluster, that runs at once."""
    at_once = model.resident_clusters(gpu, base.split_k) if base.split_k > 1 else gpu.sm_count
    return -(-sizes.n // (base.rows * at_once))


def _stages(sizes: PackedSizes, tile: PackedParams, gpu: Gpu) -> list[int]:
    ring = tile.warps_n * tile.warps_k * (tile.stage_bytes(sizes) + BARRIER_BYTES) + tile.round_bytes(sizes)
    once = 0 if tile.stream == BY_ROUNDS else tile.activation_bytes(sizes)
    most = min(MAX_STAGES, -(-tile.block_steps(sizes) // tile.warps_k) + 1)
    has_fewest = tile.keeps_steps and once + MIN_STAGES * ring <= gpu.smem_per_block_optin_bytes
    stages = {min(MIN_STAGES, most)} if has_fewest else set()
    for resident in RESIDENT:
        limit = min(gpu.smem_per_block_optin_bytes, gpu.smem_per_sm_bytes // resident - gpu.smem_reserved_per_block_bytes)
        fitting = min(most, (limit - once) // ring)
        stages |= {fitting, fitting - 1} if resident == 1 else {fitting}
    return sorted(count for count in stages if count >= MIN_STAGES)


def _secs(sizes: PackedSizes, params: PackedParams, gpu: Gpu, moved: int) -> float:
    """Return a p-norm of the times of DRAM, of L2, of an SM's schedulers, tensor cores and memory, of a warp, of copies' latency."""
    resident = occupancy(gpu, params.threads, params.registers(sizes), params.smem_bytes(sizes))
    if not resident:
        return float("inf")
    blocks = params.row_blocks(sizes) * params.split_k
    needed = -(-blocks // gpu.sm_count)
    at_once = params.split_k * (model.resident_clusters(gpu, params.split_k) if params.split_k > 1 else gpu.sm_count)
    waves = -(-blocks // (resident * at_once))
    busiest = max(needed, waves * min(resident, needed)) if waves > 1 else needed
    warps, steps = params.threads // WARP_LANES, -(-params.block_steps(sizes) // params.warps_k)
    warp_steps, cycle = busiest * warps * steps, 1 / gpu.clock_hz
    tiles = params.rows // TILE_ROWS * sizes.step // TILE_K
    multiplies = (tiles + _adds_activations(sizes, params) * sizes.step // TILE_K) * TILE_ROWS * TILE_K * sizes.fragments * 8
    smem_bytes = tiles * SMEM_TILE_BYTES + sizes.step // 32 * sizes.fragments * SMEM_FRAGMENT_BYTES
    smem_bytes += sizes.m * sizes.step * 2 * _copied_share(params)
    block_bytes = params.loaded_bytes(sizes)
    times = (
        moved / (gpu.dram_bytes_per_s * DRAM_SHARE),
        blocks * block_bytes / gpu.l2_bytes_per_s,
        busiest * block_bytes / SM_BYTES_PER_CLOCK * cycle,
        warp_steps * _instructions(sizes, params) / (SM_PARTITIONS * ISSUE_SHARE) * cycle,
        warp_steps * multiplies / multiplies_per_cycle(gpu, "float16", "float32") * cycle,
        warp_steps * smem_bytes / gpu.smem_bytes_per_clock_per_sm * cycle,
        waves * steps * (STEP_LATENCY_CYCLES + WARP_CYCLES * _instructions(sizes, params)) * cycle,
        waves * steps / (params.stages - 1) * (KEPT_LATENCY_SECS if params.keeps_steps else LOAD_LATENCY_SECS),
        busiest * params.activation_bytes(sizes) / KEPT_BYTES_PER_CLOCK * cycle if params.keeps_steps else 0.0,
    )
    return p_norm(*times, exponent=OVERLAP) + _once_secs(sizes, params, gpu, has_room=_has_room(sizes, params, gpu))


def _instructions(sizes: PackedSizes, params: PackedParams) -> float:
    """Return the instructions of a warp for a step."""
    row_tiles, k_tiles = params.rows // TILE_ROWS, sizes.step // TILE_K
    tiles, fragments = row_tiles * k_tiles, sizes.fragments
    loads = 2 * k_tiles * fragments + _copied_share(params) * STREAM_INSTRUCTIONS * sizes.m * sizes.step / 8 / WARP_LANES
    multiplies = 4 * (tiles + _adds_activations(sizes, params) * k_tiles) * fragments
    values = tiles * (FLOAT4_TILE_INSTRUCTIONS if sizes.is_float4 else INT4_TILE_INSTRUCTIONS)
    if params.scales_sums(sizes):
        adds = 4 * fragments * (1 + _adds_activations(sizes, params))
        scaling = row_tiles * sizes.step_scales * (GROUP_INSTRUCTIONS + adds)
    else:
        scaling = tiles * (SCALED_FLOAT4_INSTRUCTIONS if sizes.is_float4 else SCALED_INSTRUCTIONS)
    step = BULK_STEP_INSTRUCTIONS if params.bulk else STEP_INSTRUCTIONS
    return step + loads + multiplies + values + scaling


def _copied_share(params: PackedParams) -> float:
    """Return which part of the activations of its step a warp copies."""
    return {BY_STEPS: 1.0, BY_ROUNDS: 1 / params.warps_n}.get(params.stream, 0.0)


def _adds_activations(sizes: PackedSizes, params: PackedParams) -> bool:
    """Say whether tensor cores add up activations besides, by which zero points come off sums of codes."""
    return params.scales_sums(sizes) and not sizes.is_float4


def _activation_secs(sizes: PackedSizes, params: PackedParams, gpu: Gpu) -> float:
    """Return how long a thread block waits for its activations, of which each warp does not copy its own: in rounds it does all along."""
    if params.keeps_steps:
        return 0.0
    if params.stream == BY_ROUNDS:
        nbytes = 2 * sizes.m * params.block_steps(sizes) * sizes.step
        return nbytes / ROUND_BYTES_PER_CLOCK / gpu.clock_hz
    # Half of the first weights are on their way before the activations, which come from L2.
    return params.activation_bytes(sizes) / SM_BYTES_PER_CLOCK / gpu.clock_hz / 2


def _once_secs(sizes: PackedSizes, params: PackedParams, gpu: Gpu, *, has_room: bool) -> float:
    """Return the seconds that a kernel takes once: its launch, the first copies, the activations, the sums over warps and blocks."""
    has_pdl = gpu.compute_capability >= FIRST_PDL_CAPABILITY
    secs = model.launch_secs(gpu, has_pdl=has_pdl) + (CROWDED_SECS if has_pdl and has_room else 0.0)
    activation_secs = 0.0 if params.stream == BY_STEPS else _activation_secs(sizes, params, gpu)
    partial_secs = 2 * params.partial_bytes(sizes) / gpu.smem_bytes_per_clock_per_sm / gpu.clock_hz
    start_secs = START_SECS * (min(1.0, params.block_rows * params.warps_k / START_ROWS) if params.keeps_steps else 1.0)
    secs += DRAM_LATENCY_SECS + start_secs + activation_secs + COMBINE_SECS + BARRIER_SECS + partial_secs
    secs += (KEPT_STAGE_SECS if params.keeps_steps else STAGE_SECS) * (params.stages - MIN_STAGES) + PREFETCH_SECS * params.prefetch
    # Thread blocks that share k do not meet before they load.
    return secs + (model.SPLIT_K_CLUSTER_SECS + CLUSTER_BLOCK_SECS * (params.split_k - 2) if params.split_k > 1 else 0.0)
