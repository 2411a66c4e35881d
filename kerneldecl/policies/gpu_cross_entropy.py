"""Owns among how many threads a row of a cross entropy should be shared on a GPU, in one pass or in registers, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.cross_entropy import CrossEntropyParams, LossSizes, loss_sizes_of, takes
from kerneldecl.model import Arch, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies import gpu_rowwise
from kerneldecl.policies.gpu.gemm_tiles import interleaved
from kerneldecl.policies.gpu.time_model import ACCESS_FLOPS, WARP_CYCLES, Timed, Work, access_widths, ranked, rounds
from kerneldecl.policies.gpu_rowwise import INSTRUCTION_CYCLES, INSTRUCTION_FLOPS, OTHER_REGISTERS, SHUFFLE_CYCLES

TEMPLATES = ("gpu_cross_entropy", "gpu_rowwise")
AUTO = {"cuda": 59}
HAS_TRACES = False

BLOCK_THREADS = (128, 256, 512, 1024)
UNROLL = (1, 2, 4)
ELEMENT_INSTRUCTIONS = 5.0
"""Instructions for an element: widened, compared, subtracted and scaled, a power, added."""
SHUFFLES = 20
"""Shuffles of a warp: five for the maximum and five for the sum, before the exchange and after it."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the one-pass kernels and, in turns, the chains of reductions of gpu_rowwise; nothing for what is no cross entropy."""
    sizes, gpu = loss_sizes_of(space), arch.the_gpu
    if sizes is None or not takes(sizes):
        return ()
    own = ranked("gpu_cross_entropy", gpu, (_timed(sizes, params, gpu) for params in choices(sizes, gpu)), top_k)
    found = sorted((own, gpu_rowwise.propose(space, arch, top_k)), key=lambda each: each[0].predicted_secs if each else float("inf"))
    return tuple(interleaved(*found))[:top_k]


def choices(sizes: LossSizes, gpu: Gpu) -> Iterator[CrossEntropyParams]:
    """Yield the search space."""
    widths = access_widths(sizes.classes, dtype_bytes(sizes.dtype))
    for params in itertools.starmap(CrossEntropyParams, itertools.product(widths, BLOCK_THREADS, UNROLL)):
        # Threads should not be mostly idle.
        is_filled = params.threads == min(BLOCK_THREADS) or params.threads < 2 * sizes.classes // params.width
        if is_filled and (params.unroll == 1 or params.steps(sizes) > 1) and params.fits(sizes, gpu):
            yield params


def _timed(sizes: LossSizes, params: CrossEntropyParams, gpu: Gpu) -> Timed:
    element, elements = dtype_bytes(sizes.dtype), sizes.rows * sizes.classes
    loaded, steps = params.width * params.unroll, params.steps(sizes)
    waste = steps * loaded * params.threads / sizes.classes
    work = Work(
        blocks=sizes.rows,
        threads=params.threads,
        regs_per_thread=OTHER_REGISTERS + -(-loaded * element // 4) + loaded,
        flops=elements * (INSTRUCTION_FLOPS * ELEMENT_INSTRUCTIONS + ACCESS_FLOPS / params.width) * waste,
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=elements * element,
        l2_bytes=elements * element * waste,
        rounds=steps * rounds(loaded * element),
        barriers=1,
        serial_cycles=INSTRUCTION_CYCLES * ELEMENT_INSTRUCTIONS * loaded * steps + SHUFFLES * SHUFFLE_CYCLES,
        warp_cycles=WARP_CYCLES,
    )
    return params._asdict(), (work,)
