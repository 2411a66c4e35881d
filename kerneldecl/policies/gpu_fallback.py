"""Owns in which order the schedules that fit every function are tried on a GPU.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

from collections.abc import Iterator

from kerneldecl.model import Access, Arch, Block, Gpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.gpu.time_model import Timed, Work, ranked
from kerneldecl.policies.shared.traffic import operand_bytes, points

TEMPLATES = ("gpu_fallback",)
AUTO = {"cuda": 90}

THREADS = (128, 256, 64, 32, 512)
UNROLLED = 4
"""Turns of a thread's loop whose loads are in flight at once: nvcc unrolls so many, and predictions of eight functions have the right mean
with it (H200, 2026-11)."""


LONGEST_SECS = 20.0
"""Predicted seconds of a call from which on nothing is proposed: the verification of several calls ends after 20 s by default. Such are
sums of as many elements for each result as there are results, of a row of millions."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return sizes of a thread block; every function has a schedule where a thread reduces alone. Nothing where no call would end."""
    found = ranked("gpu_fallback", arch.the_gpu, _sizes(space, arch.the_gpu), top_k)
    return tuple(proposal for proposal in found if proposal.predicted_secs <= LONGEST_SECS)


def _sizes(space: IterSpace, gpu: Gpu) -> Iterator[Timed]:
    longest = max((points(block, "reduce") for block in space.blocks if block.is_reduction), default=0)
    for threads in THREADS:
        for across in (False, True)[: 1 + (longest >= threads)]:
            yield {"threads": threads, "across": across}, tuple(_work(block, gpu, threads, across) for block in space.blocks)


def _work(block: Block, gpu: Gpu, threads: int, across: bool) -> Work:
    shared = threads if across and block.is_reduction and points(block, "reduce") >= threads else 1
    return Work(
        blocks=max(1, -(-points(block, "spatial") * shared // threads)),
        threads=threads,
        flops=points(block) * max(1, block.flops_per_point),
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=sum(operand_bytes(access) for access in (*block.reads, *block.writes)),
        l2_bytes=sum(points(block) * dtype_bytes(access.dtype) for access in _varying(block)),
        rounds=-(-points(block, "reduce") // (shared * UNROLLED)),
        barriers=int(shared > 1),
    )


def _varying(block: Block) -> list[Access]:
    return [access for access in block.reads if any(access.index)]
