"""Owns which GEMVs with packed 4-bit weights on mma.sync a GPU should try, and how long each is predicted to take.

Knows nothing of TVM or of how the template applies them. Times are those of persistent kernels, but for the activations, which stay in
shared memory.

With PDL thread blocks of the next kernel come as soon as an SM has room, and wait there. Where the grid does not fill all SMs, some SMs
then get two thread blocks of one kernel and others none: so each is alone on its SM. Rejected: as many thread blocks as fill all SMs, with
room for the next kernel's beside them, which took 10.6 to 13.3 us where one of 64 rows alone took 10.1 (8192 x 8192; H200, 2026-11).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.gemv_packed import GEMV_TILES, GemvPackedParams
from kerneldecl.analysis.gpu_limits import FIRST_CLUSTER_CAPABILITY, FIRST_PDL_CAPABILITY, SM_PARTITIONS
from kerneldecl.analysis.matmul_packed import PackedSizes
from kerneldecl.analysis.matmul_packed_persistent import STEPS
from kerneldecl.analysis.packed_weights import TILE_K, TILE_ROWS
from kerneldecl.model import Gpu, Proposal
from kerneldecl.policies.gpu import packed_persistent as persistent
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first, interleaved, least_secs
from kerneldecl.policies.gpu.tensor_core_model import multiplies_per_cycle
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, SM_BYTES_PER_CLOCK, p_norm

MAX_PROPOSED_ROWS = 4
"""Rows of activations at most: with more, thread blocks wait for their activations, and kernels in clusters come first. Of four rows a GEMV
took 11.4 us, the fastest other kernel 11.8 (8192 x 8192; H200, 2026-11)."""
MAX_PROPOSALS = 10
SM_WARPS = (16, 32)
"""Warps of an SM."""
BLOCKS = (1, 2)
"""Thread blocks that share an SM."""
STEP_BYTES = (1 << 10, 1 << 11, 1 << 12)
"""Bytes of weights of a step: the fastest kernels of `gpu_gemv_i4` and the persistent form copied 2 KB (H200, 2026-11)."""
COPIES, PLAIN_COPIES = ((2, 1, 1), (2, 0, 1), (3, 0, 1)), ((2, 0, 0), (3, 0, 0))
"""Values of `stages`, `bulk` and `prefetch`, and the same for GPUs without bulk copies and PDL."""
SAME_TILE = 1
"""Proposals of one tile at most; see `gemm_tiles.best_first`."""

# Instructions of a warp, counted in what nvcc 13.0 makes of the kernel for sm_90a.

STEP_INSTRUCTIONS, BULK_STEP_INSTRUCTIONS = 50.0, 67.0
"""For a step: the loop, addresses, copies."""
K_TILE_INSTRUCTIONS = 8.0
"""For 64 elements along k: two ldmatrix, and four MMAs that add up activations."""
RUN_INSTRUCTIONS = 12.0
"""For scales and zero points of a step along k."""
LOAD_LATENCY_SECS = 0.4e-6
"""Seconds from a copy to its arrival, while all SMs load. Assumed, less than for persistent kernels: of GEMVs with weights in rows, whose
warps read weights that follow each other as well, those of sixteen warps with two stages of 2 KB were faster than all with more (16384 x
16384; H200, 2026-11)."""
ACTIVATION_BYTES_PER_CLOCK = 19.0
"""Rate at which activations come to a thread block that all others ask for at the same time: a warp waits for its own alone, so it is
higher than that of persistent kernels. Four rows took 1.2 to 1.6 us longer than one (8192 x 8192; H200, 2026-11), as the next two."""
BULK_SECS = -0.3e-6
"""Seconds that bulk copies cost: they save 0.16 and 0.35 us of tiles of 64 and 32 rows, and cost 0.3 of those of 16."""
NEXT_TILE_SECS = 0.4e-6
"""Seconds that it costs to have more than one tile: one of 64 rows took 10.0 to 10.25 us, two and four 10.3 to 10.8."""


def proposals(sizes: PackedSizes, gpu: Gpu, moved: int) -> Iterator[Proposal]:
    """Yield up to MAX_PROPOSALS, best first, with and without bulk copies in turns; `moved` are the bytes that must come from DRAM."""
    found = [Estimate(params, _secs(sizes, params, gpu, moved), _tile(params)) for params in choices(sizes, gpu)]
    ways = [list(best_first((each for each in found if each.tile[-1] == bulk), SAME_TILE)) for bulk in (0, 1)]
    first, others = sorted(ways, key=least_secs)
    yield from itertools.islice(interleaved(first, others, every=2), MAX_PROPOSALS)


def _tile(params: GemvPackedParams) -> tuple[int, ...]:
    """Return what decides in which pieces weights come, how, and to which thread blocks."""
    return params.rows, params.step, params.warps, params.tiles, params.bulk


def choices(sizes: PackedSizes, gpu: Gpu) -> Iterator[GemvPackedParams]:
    """Yield the search space: thread blocks for which all SMs have room at once, and which half of them get at least."""
    if sizes.m > MAX_PROPOSED_ROWS:
        return
    copies = COPIES if gpu.compute_capability >= FIRST_CLUSTER_CAPABILITY else PLAIN_COPIES
    for rows, step, blocks, sm_warps, (stages, bulk, prefetch) in itertools.product(GEMV_TILES, STEPS, BLOCKS, SM_WARPS, copies):
        tiles = -(-sizes.n // (rows * blocks * gpu.sm_count))
        params = GemvPackedParams(rows, step, sm_warps // blocks, tiles, stages, blocks, bulk, prefetch)
        grid = params.walk.blocks(sizes)
        # With fewer rows of weights k should be divided among thread blocks.
        fills = 2 * grid >= gpu.sm_count and grid > (blocks - 1) * gpu.sm_count
        if rows * step // 2 in STEP_BYTES and fills:
            placed = params._replace(alone=int(gpu.compute_capability >= FIRST_PDL_CAPABILITY))
            if placed.fits(sizes, gpu):
                yield placed


def _secs(sizes: PackedSizes, params: GemvPackedParams, gpu: Gpu, moved: int) -> float:
    """Return a p-norm of the times of DRAM, of an SM's copies, schedulers and tensor cores, of a warp by itself, of copies' latency."""
    walk, cycle = params.walk, 1 / gpu.clock_hz
    per_sm = -(-walk.blocks(sizes) // gpu.sm_count)
    warp_steps, warps = walk.tiles * walk.slice_steps(sizes), per_sm * walk.warps
    instructions = _instructions(sizes, params)
    step_bytes, issued = walk.stage_bytes(sizes), warps * instructions / (SM_PARTITIONS * persistent.ISSUE_SHARE) * cycle
    multiplies = (params.rows + TILE_ROWS) * params.step * 8
    times = (
        moved / (gpu.dram_bytes_per_s * DRAM_SHARE),
        warps * warp_steps * step_bytes / SM_BYTES_PER_CLOCK * cycle,
        warp_steps * issued,
        warps * warp_steps * multiplies / multiplies_per_cycle(gpu, "float16", "float32") * cycle,
        warp_steps * (persistent.MMA_CYCLES * params.step / 16 + persistent.WARP_CYCLES * instructions) * cycle,
        warp_steps / (params.stages - 1) * LOAD_LATENCY_SECS,
    )
    activation_secs = per_sm * params.activation_bytes(sizes) / ACTIVATION_BYTES_PER_CLOCK * cycle
    once_secs = persistent.once_secs(sizes, walk, gpu, has_room=False)
    once_secs += BULK_SECS * params.bulk + NEXT_TILE_SECS * (params.tiles > 1)
    # The last arrivals are multiplied alone.
    return p_norm(*times, exponent=persistent.OVERLAP) + issued + activation_secs + once_secs


def _instructions(sizes: PackedSizes, params: GemvPackedParams) -> float:
    """Return the instructions of a warp for a step."""
    row_tiles, k_tiles = params.rows // TILE_ROWS, params.step // TILE_K
    step = BULK_STEP_INSTRUCTIONS if params.bulk else STEP_INSTRUCTIONS
    # With one row of activations a lane scales results of one tile, which it selects.
    results = 2 * row_tiles if sizes.m == 1 else 16 * row_tiles
    run = RUN_INSTRUCTIONS + results
    return step + k_tiles * (K_TILE_INSTRUCTIONS + row_tiles * (persistent.TILE_INSTRUCTIONS + 4)) + params.walk.step_scales(sizes) * run
