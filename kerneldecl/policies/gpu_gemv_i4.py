"""Owns into which warps and stages a vector's product with 4-bit weights should be cut on a GPU, and what to try first.

Knows nothing of TVM or of how templates apply it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from kerneldecl.analysis.contraction import FIRST_CAPABILITY
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal
from kerneldecl.policies import gpu_gemv
from kerneldecl.policies.gpu.gemm_tiles import Estimate, mixed, ranked
from kerneldecl.policies.gpu.time_model import DRAM_SHARE, SM_BYTES_PER_CLOCK
from kerneldecl.policies.shared.traffic import moved_bytes, only_reduction

TEMPLATE = "gpu_gemv_i4"
TEMPLATES = (TEMPLATE, *gpu_gemv.TEMPLATES)
AUTO = {"cuda": 20}
HAS_TRACES = False

ROWS, WARPS, STAGES, BLOCKS, WARPS_K = (2, 4, 8), (8, 16, 24, 32), (2, 3, 4, 6, 8), (1, 2), (1, 2, 4, 8, 16)
STEP, STEP_BYTES = 1024, 512
"""The template's: weights of a row that a warp takes at once."""
GROUPS = (128, 256, 512, 1024)
LEAST_COPY_BYTES = 4
LANES = 32
ALIKE = 2
"""Of the same rows, warps, blocks and place of the vector, which differ in what is on its way."""
STEP_CYCLES, UNIT_CYCLES, FINISH_CYCLES = 60.0, 22.0, 10.0
"""Of a scheduler, for a step of a warp, for each 256 weights in it, and for adding up what lanes have of their rows. Fitted, like
what follows, to 234 cuts of 16384 x 16384, 8192 x 8192, 4096 x 4096, 11008 x 4096 and 4096 x 11008 weights on an H200."""
STEP_LATENCY, UNIT_LATENCY = 300.0, 22.0
"""Of a warp alone on its scheduler."""
LOADED_LATENCY_SECS = 6e-7
"""Of a step's weights, beside what the memory's bandwidth takes."""
SHARED_SECS = 9e-7
"""Until a block has the vector in shared memory: its threads meet twice."""
FILLED_SHARE = 0.48
"""Of the time in which all stages are filled, what passes before warps are at work."""
UNPACKED = 1.3
"""How much longer gpu_gemv takes than it says where weights have 4 bits: 1.2 to 2.9 times, measured on an H200."""
PARTITIONS = 4
OVERLAP = 5.0
IN_DOUBT = 1.3
"""How much slower than the other template a template's best may be predicted, and still be tried."""


class Cut(NamedTuple):
    """The template's parameters."""

    rows: int
    warps: int
    stages: int
    blocks: int
    warps_k: int

    def candidate(self) -> Candidate:
        return Candidate.of(TEMPLATE, self._asdict())


class Sizes(NamedTuple):
    """Of the product: weights of a row, rows, weights that share a scale, and the bytes of all arguments."""

    n: int
    k: int
    group: int
    moved_bytes: int


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return cuts of a product with 4-bit weights, among them the best of gpu_gemv; nothing for other computations."""
    sizes, gpu = sizes_of(space), arch.the_gpu
    if sizes is None or gpu.compute_capability < FIRST_CAPABILITY or not gpu.async_copy:
        return ()
    estimates = (Estimate(cut, _secs(sizes, cut, gpu), (cut.rows, cut.warps, cut.blocks, _holds(sizes, cut))) for cut in cuts(sizes, gpu))
    others = [replace(found, predicted_secs=found.predicted_secs * UNPACKED) for found in gpu_gemv.propose(space, arch, top_k)]
    mine = tuple(ranked(estimates, ALIKE))
    first, second = sorted((mine, others), key=lambda found: min((proposal.predicted_secs for proposal in found), default=math.inf))
    rivals = [proposal for proposal in second if proposal.predicted_secs <= IN_DOUBT * first[0].predicted_secs]
    return tuple(mixed(first, rivals))[:top_k] if mine else ()


def sizes_of(space: IterSpace) -> Sizes | None:
    """Return the sizes of what looks like the template's computation, None where it does not; the template reads it in full."""
    found = only_reduction(space)
    reads = found[0].reads if found else ()
    if [(access.dtype, len(access.shape)) for access in reads] != [("uint8", 2), ("float16", 2), ("float16", 1)]:
        return None
    (n, row_bytes), (_, groups), (k,) = (access.shape for access in reads)
    group = k // groups
    return Sizes(n, k, group, moved_bytes(space)) if k == 2 * row_bytes == group * groups and group in GROUPS and n * k < 2**32 else None


def cuts(sizes: Sizes, gpu: Gpu) -> Iterator[Cut]:
    """Yield the lattice: what fits shared memory."""
    scales = STEP // sizes.group
    at_once = math.gcd(scales, sizes.k // sizes.group, 8)
    if 2 * at_once < LEAST_COPY_BYTES:
        return
    for cut in itertools.starmap(Cut, itertools.product(ROWS, WARPS, STAGES, BLOCKS, WARPS_K)):
        if cut.warps % cut.warps_k or cut.warps_k not in _warps_along_k(sizes):
            continue
        used = smem_bytes(sizes, cut, gpu)
        is_resident = cut.blocks * (used + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
        is_whole = cut.rows * scales // at_once <= LANES and cut.rows * cut.warps * cut.blocks <= max(16, sizes.n)
        if (
            used <= gpu.smem_per_block_optin_bytes
            and is_resident
            and is_whole
            and cut.blocks * cut.warps * LANES <= gpu.max_threads_per_sm // 2
        ):
            yield cut


def _warps_along_k(sizes: Sizes) -> tuple[int, ...]:
    """Return how many warps may share rows: one, or as many as hold the vector; only where none do, others."""
    steps = -(-sizes.k // STEP)
    return (1, steps) if steps in WARPS_K else tuple(warps_k for warps_k in WARPS_K if warps_k <= steps)


def smem_bytes(sizes: Sizes, cut: Cut, gpu: Gpu) -> int:
    """Return the shared memory of a block: all warps' stages of weights and scales, the vector, and parts of results."""
    ring = cut.warps * cut.stages * cut.rows * (STEP_BYTES + 2 * STEP // sizes.group)
    rows = _turns(sizes, cut, gpu) * cut.warps // cut.warps_k * cut.rows
    kept = 1 if _holds(sizes, cut) else -(-sizes.k // STEP)
    return ring + (2 * STEP + 32) * kept + 4 * max(4, rows * cut.warps_k if cut.warps_k > 1 else 0)


def _holds(sizes: Sizes, cut: Cut) -> bool:
    """Say whether a warp takes one step of each of its rows, with what it needs of the vector in registers."""
    return cut.warps_k == -(-sizes.k // STEP)


def _grid(sizes: Sizes, cut: Cut, gpu: Gpu) -> int:
    return min(cut.blocks * gpu.sm_count, -(-sizes.n * cut.warps_k // (cut.rows * cut.warps)))


def _turns(sizes: Sizes, cut: Cut, gpu: Gpu) -> int:
    """Return how many groups of rows a warp takes."""
    return -(-sizes.n * cut.warps_k // (cut.rows * cut.warps * _grid(sizes, cut, gpu)))


def _secs(sizes: Sizes, cut: Cut, gpu: Gpu) -> float:
    """Return a norm of the times of memory, of what an SM's warps have on its way at once, of instructions and of a warp's own steps."""
    grid, turns = _grid(sizes, cut, gpu), _turns(sizes, cut, gpu)
    steps = -(-sizes.k // (STEP * cut.warps_k))
    warps, units = cut.warps * -(-grid // gpu.sm_count), 4 * cut.rows
    busy = max(1.0, warps / PARTITIONS) * (STEP_CYCLES + units * UNIT_CYCLES + FINISH_CYCLES / steps)
    step_bytes = cut.rows * STEP_BYTES
    dram_bytes_per_s = gpu.dram_bytes_per_s * DRAM_SHARE
    times = (
        sizes.moved_bytes / dram_bytes_per_s,
        turns * steps / (cut.stages - 1) * LOADED_LATENCY_SECS,
        turns * steps * max(busy, STEP_LATENCY + units * UNIT_LATENCY) / gpu.clock_hz,
        turns * steps * step_bytes * warps / (SM_BYTES_PER_CLOCK * gpu.clock_hz),
    )
    # Before the first multiplication come the vector, for each block unless warps hold their own parts, and the first weights.
    filled = (cut.stages - 1) * step_bytes * cut.warps * grid / dram_bytes_per_s * FILLED_SHARE
    shared = 0.0 if _holds(sizes, cut) else cut.blocks * 2 * sizes.k / (SM_BYTES_PER_CLOCK * gpu.clock_hz) + SHARED_SECS
    return float(sum(secs**OVERLAP for secs in times) ** (1 / OVERLAP)) + filled + shared + gpu.launch_secs
