"""Owns into which warps and stages a matrix-vector multiplication (GEMV) with 4-bit weights should be cut on a GPU, and what to try first.

Knows nothing of TVM or of how templates apply it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from kerneldecl.analysis.gpu_limits import MIN_ASYNC_COPY_BYTES, SM_PARTITIONS, WARP_LANES
from kerneldecl.analysis.params import I4_GROUPS, I4_ROWS, I4_STEP, I4_STEP_BYTES, GemvI4Params
from kerneldecl.analysis.tensor_cores import first_capability
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal
from kerneldecl.policies import gpu_gemv
from kerneldecl.policies.gpu.gemm_tiles import Estimate, best_first, interleaved
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, INTEGERS_PER_CYCLE, SM_BYTES_PER_CLOCK, p_norm
from kerneldecl.policies.shared.reduction import only_reduction
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATE = "gpu_gemv_i4"
TEMPLATES = (TEMPLATE, *gpu_gemv.TEMPLATES)
AUTO = {"cuda": 20}
HAS_TRACES = False

WARPS, STAGES, BLOCKS, WARPS_K = (8, 16, 24, 32), (2, 3, 4, 6, 8), (1, 2), (1, 2, 4, 8, 16)
SAME_TILE = 2
"""Candidates with the same rows, warps, blocks and place of the vector that are proposed: they differ in the copies in flight."""
STEP_CYCLES, UNIT_CYCLES, FINISH_CYCLES = 60.0, 22.0, 10.0
"""Cycles of a scheduler for a warp's step of 1024 weights per row, for each 256 weights in it, and to add up the lanes' partial results.
Fitted, like what follows, to 234 tilings of 16384 x 16384, 8192 x 8192, 4096 x 4096, 11008 x 4096 and 4096 x 11008 weights on an H200."""
STEP_LATENCY_CYCLES, UNIT_LATENCY_CYCLES = 300.0, 22.0
"""Cycles of the same for a warp alone on its scheduler."""
LOADED_LATENCY_SECS = 6e-7
"""Seconds from the issue of a step's copies to their arrival, besides what the memory's bandwidth takes."""
VECTOR_SECS = 9e-7
"""Seconds until a block has the vector in shared memory: its threads meet twice."""
FILL_SHARE = 0.48
"""Fraction of the time in which all stages are filled that passes before warps compute."""
UNPACK_INSTRUCTIONS = 5.0
"""Integer instructions in which gpu_gemv unpacks and converts a weight, besides what its policy predicts. Fitted to 100 kernels of six
matrices, 0.92 to 2.1 times as long as predicted without (H200, 2026-11)."""
OVERLAP = 5.0
"""Exponent of the p-norm of times that overlap."""
RIVAL_SLOWDOWN = 1.3
"""How much slower than the best of all the other template's candidates may be predicted, and still be tried."""


class Sizes(NamedTuple):
    """What all tilings of one GEMV share."""

    n: int
    """Rows of weights."""
    k: int
    """Weights of a row."""
    group: int
    """Weights that share a scale."""
    moved_bytes: int
    """Bytes of all arguments."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return tilings of a GEMV with 4-bit weights, with the best of gpu_gemv among them; nothing for other computations."""
    sizes, gpu = sizes_of(space), arch.the_gpu
    if sizes is None or gpu.compute_capability < first_capability("mma.sync") or not gpu.async_copy:
        return ()
    own = tuple(best_first((_estimate(sizes, tiling, gpu) for tiling in tilings(sizes, gpu)), SAME_TILE))
    unpack_secs = UNPACK_INSTRUCTIONS * sizes.n * sizes.k / (INTEGERS_PER_CYCLE * gpu.sm_count * gpu.clock_hz)
    others = [replace(found, predicted_secs=found.predicted_secs + unpack_secs) for found in gpu_gemv.propose(space, arch, top_k)]
    first, second = sorted((own, others), key=lambda found: min((proposal.predicted_secs for proposal in found), default=math.inf))
    rivals = [proposal for proposal in second if proposal.predicted_secs <= RIVAL_SLOWDOWN * first[0].predicted_secs]
    return tuple(interleaved(first, rivals))[:top_k] if own else ()


def sizes_of(space: IterSpace) -> Sizes | None:
    """Return the sizes of what looks like the template's computation, None where it does not; the template reads it in full."""
    found = only_reduction(space)
    reads = found[0].reads if found else ()
    if [(access.dtype, len(access.shape)) for access in reads] != [("uint8", 2), ("float16", 2), ("float16", 1)]:
        return None
    (n, row_bytes), (_, groups), (k,) = (access.shape for access in reads)
    group = k // groups
    is_i4 = k == 2 * row_bytes == group * groups and group in I4_GROUPS and n * k < 2**32
    return Sizes(n, k, group, moved_bytes(space)) if is_i4 else None


def tilings(sizes: Sizes, gpu: Gpu) -> Iterator[GemvI4Params]:
    """Yield the search space: what fits shared memory."""
    scales = I4_STEP // sizes.group
    copied_scales = math.gcd(scales, sizes.k // sizes.group, 8)
    if 2 * copied_scales < MIN_ASYNC_COPY_BYTES:
        return
    all_warps_k = _all_warps_k(sizes)
    for rows, warps, stages, blocks, warps_k in itertools.product(I4_ROWS, WARPS, STAGES, BLOCKS, WARPS_K):
        if warps % warps_k or warps_k not in all_warps_k:
            continue
        tiling = GemvI4Params(rows=rows, warps=warps, stages=stages, blocks=blocks, warps_k=warps_k)
        used = smem_bytes(sizes, tiling, gpu)
        if (
            used <= gpu.smem_per_block_optin_bytes
            and blocks * (used + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
            and rows * scales // copied_scales <= WARP_LANES
            and rows * warps * blocks <= max(16, sizes.n)
            and blocks * warps * WARP_LANES <= gpu.max_threads_per_sm // 2
        ):
            yield tiling


def _all_warps_k(sizes: Sizes) -> tuple[int, ...]:
    """Return how many warps may share rows: one, or as many as hold the vector in registers; other numbers only where none do."""
    steps = -(-sizes.k // I4_STEP)
    return (1, steps) if steps in WARPS_K else tuple(warps_k for warps_k in WARPS_K if warps_k <= steps)


def smem_bytes(sizes: Sizes, tiling: GemvI4Params, gpu: Gpu) -> int:
    """Return the shared memory of a block: all warps' stages of weights and scales, the vector, and partial results."""
    stages = tiling.warps * tiling.stages * tiling.rows * (I4_STEP_BYTES + 2 * I4_STEP // sizes.group)
    rows = _turns(sizes, tiling, gpu) * tiling.warps // tiling.warps_k * tiling.rows
    vector_steps = 1 if _holds_vector(sizes, tiling) else -(-sizes.k // I4_STEP)
    partial_results = rows * tiling.warps_k if tiling.warps_k > 1 else 0
    return stages + (2 * I4_STEP + 32) * vector_steps + 4 * max(4, partial_results)


def _holds_vector(sizes: Sizes, tiling: GemvI4Params) -> bool:
    """Say whether a warp takes one step of each of its rows, with what it needs of the vector in registers."""
    return tiling.warps_k == -(-sizes.k // I4_STEP)


def _grid(sizes: Sizes, tiling: GemvI4Params, gpu: Gpu) -> int:
    """Return how many thread blocks the kernel has."""
    return min(tiling.blocks * gpu.sm_count, -(-sizes.n * tiling.warps_k // (tiling.rows * tiling.warps)))


def _turns(sizes: Sizes, tiling: GemvI4Params, gpu: Gpu) -> int:
    """Return how many groups of rows a warp computes, one after another."""
    return -(-sizes.n * tiling.warps_k // (tiling.rows * tiling.warps * _grid(sizes, tiling, gpu)))


def _estimate(sizes: Sizes, tiling: GemvI4Params, gpu: Gpu) -> Estimate:
    tile = (tiling.rows, tiling.warps, tiling.blocks, _holds_vector(sizes, tiling))
    return Estimate(tiling, _secs(sizes, tiling, gpu), tile)


def _secs(sizes: Sizes, tiling: GemvI4Params, gpu: Gpu) -> float:
    """Return a p-norm of the times of memory, of an SM's copies in flight, of its schedulers and of its bandwidth from L2."""
    grid, turns = _grid(sizes, tiling, gpu), _turns(sizes, tiling, gpu)
    steps = -(-sizes.k // (I4_STEP * tiling.warps_k))
    warps, units = tiling.warps * -(-grid // gpu.sm_count), 4 * tiling.rows
    busy = max(1.0, warps / SM_PARTITIONS) * (STEP_CYCLES + units * UNIT_CYCLES + FINISH_CYCLES / steps)
    step_bytes = tiling.rows * I4_STEP_BYTES
    dram_bytes_per_s = gpu.dram_bytes_per_s * DRAM_SHARE
    times = (
        sizes.moved_bytes / dram_bytes_per_s,
        turns * steps / (tiling.stages - 1) * LOADED_LATENCY_SECS,
        turns * steps * max(busy, STEP_LATENCY_CYCLES + units * UNIT_LATENCY_CYCLES) / gpu.clock_hz,
        turns * steps * step_bytes * warps / (SM_BYTES_PER_CLOCK * gpu.clock_hz),
    )
    # Before the first multiplication come the vector, for each block unless warps hold their parts of it, and the first weights.
    fill_secs = (tiling.stages - 1) * step_bytes * tiling.warps * grid / dram_bytes_per_s * FILL_SHARE
    is_held = _holds_vector(sizes, tiling)
    vector_secs = 0.0 if is_held else tiling.blocks * 2 * sizes.k / (SM_BYTES_PER_CLOCK * gpu.clock_hz) + VECTOR_SECS
    return p_norm(*times, exponent=OVERLAP) + fill_secs + vector_secs + gpu.launch_secs
