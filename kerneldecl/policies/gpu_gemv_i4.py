"""Owns into which warps and stages a vector's product with 4-bit weights should be cut on a GPU, and what to try first.

Knows nothing of TVM or of how templates apply it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kerneldecl.contraction import FIRST_CAPABILITY
from kerneldecl.model import Arch, Candidate, Gpu, IterSpace, Proposal
from kerneldecl.policies import gpu_gemv
from kerneldecl.policies._cpu_traffic import moved_bytes, only_reduction
from kerneldecl.policies._gpu_model import DRAM_LATENCY_SECS, DRAM_SHARE, SM_BYTES_PER_CLOCK
from kerneldecl.policies._gpu_products import Estimate, mixed, ranked

TEMPLATES = ("gpu_gemv_i4", *gpu_gemv.TEMPLATES)

ROWS, WARPS, STAGES, BLOCKS = (2, 4, 8), (4, 8, 16), (3, 4, 6, 8, 12), (1, 2, 4)
STEP, STEP_BYTES = 1024, 512
"""The template's: weights of a row that a warp takes at once."""
GROUPS = (128, 256, 512, 1024)
LEAST_COPY_BYTES = 4
LANES = 32
ALIKE = 2
"""Of the same rows, warps and blocks, which differ in what is on its way."""
UNITS_CYCLES = 17.0
"""Of a scheduler, for 256 weights: 16 instructions, as nvcc makes them, and their share of addresses."""
STEP_CYCLES = 450.0
"""That a warp takes for a step at least: eight multiplications one after the other, and what comes before and after them."""
PARTITIONS = 4
OVERLAP = 4.0
IN_DOUBT = 1.3
"""How much slower than the other template a template's best may be predicted, and still be tried."""


class Cut(NamedTuple):
    """The template's parameters."""

    rows: int
    warps: int
    stages: int
    blocks: int


class Sizes(NamedTuple):
    """Of the product: weights of a row, rows, weights that share a scale, and the bytes of all arguments."""

    n: int
    k: int
    group: int
    moved_bytes: int


def propose(space: IterSpace, arch: Arch, top_k: int, measured: Sequence[object]) -> tuple[Proposal, ...]:
    """Return cuts of a product with 4-bit weights, among them the best of gpu_gemv; nothing for other computations."""
    sizes, gpu = sizes_of(space), arch.the_gpu
    if measured or sizes is None or gpu.compute_capability < FIRST_CAPABILITY or not gpu.async_copy:
        return ()
    estimates = (
        Estimate(Candidate.of("gpu_gemv_i4", cut._asdict()), _secs(sizes, cut, gpu), cut[:2] + cut[3:]) for cut in cuts(sizes, gpu)
    )
    mine, others = ranked(estimates, ALIKE), gpu_gemv.propose(space, arch, top_k, ())
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
    for cut in itertools.starmap(Cut, itertools.product(ROWS, WARPS, STAGES, BLOCKS)):
        used = smem_bytes(sizes, cut)
        is_resident = cut.blocks * (used + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
        is_whole = cut.rows * scales // at_once <= LANES and cut.rows * cut.warps * cut.blocks <= max(16, sizes.n)
        if (
            used <= gpu.smem_per_block_optin_bytes
            and is_resident
            and is_whole
            and cut.blocks * cut.warps * LANES <= gpu.max_threads_per_sm // 2
        ):
            yield cut


def smem_bytes(sizes: Sizes, cut: Cut) -> int:
    """Return the shared memory of a block: all warps' stages of weights and scales, and the vector."""
    return cut.warps * cut.stages * cut.rows * (STEP_BYTES + 2 * STEP // sizes.group) + 2 * STEP * -(-sizes.k // STEP)


def _secs(sizes: Sizes, cut: Cut, gpu: Gpu) -> float:
    """Return a norm of the times of memory, of what an SM's warps have on its way at once, of instructions and of a warp's own steps."""
    steps, tiles = -(-sizes.k // STEP), -(-sizes.n // cut.rows)
    grid = min(cut.blocks * gpu.sm_count, -(-tiles // cut.warps))
    turns = -(-tiles // (grid * cut.warps))
    warps = cut.warps * -(-grid // gpu.sm_count)
    step_bytes = cut.rows * STEP_BYTES
    streamed = turns * steps * step_bytes * warps
    times = (
        sizes.moved_bytes / (gpu.dram_bytes_per_s * DRAM_SHARE),
        turns * steps / (cut.stages - 1) * DRAM_LATENCY_SECS,
        turns * steps * max(STEP_CYCLES, max(1.0, warps / PARTITIONS) * cut.rows * 4 * UNITS_CYCLES) / gpu.clock_hz,
        streamed / (SM_BYTES_PER_CLOCK * gpu.clock_hz),
    )
    # Before the first multiplication come the vector, for each block, and the first weights.
    start = DRAM_LATENCY_SECS + cut.blocks * 2 * sizes.k / (SM_BYTES_PER_CLOCK * gpu.clock_hz)
    return float(sum(secs**OVERLAP for secs in times) ** (1 / OVERLAP)) + start + gpu.launch_secs
