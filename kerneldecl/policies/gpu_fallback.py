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


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return sizes of a thread block; every function has a schedule with each."""
    return ranked("gpu_fallback", arch.the_gpu, _sizes(space, arch.the_gpu), top_k)


def _sizes(space: IterSpace, gpu: Gpu) -> Iterator[Timed]:
    for threads in THREADS:
        yield {"threads": threads}, tuple(_work(block, gpu, threads) for block in space.blocks)


def _work(block: Block, gpu: Gpu, threads: int) -> Work:
    return Work(
        blocks=max(1, -(-points(block, "spatial") // threads)),
        threads=threads,
        flops=points(block) * max(1, block.flops_per_point),
        flops_per_s=gpu.simt_rate("float32"),
        dram_bytes=sum(operand_bytes(access) for access in (*block.reads, *block.writes)),
        l2_bytes=sum(points(block) * dtype_bytes(access.dtype) for access in _varying(block)),
        rounds=points(block, "reduce"),
    )


def _varying(block: Block) -> list[Access]:
    return [access for access in block.reads if any(access.index)]
