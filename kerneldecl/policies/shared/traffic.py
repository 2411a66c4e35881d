"""Owns the time model of kernels that touch each operand once: bytes through the caches, cycles of vector code, threads.

Knows nothing of operators, templates or TVM.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kerneldecl.model import Access, Block, Candidate, Cpu, IterSpace, Proposal, Value, dtype_bytes
from kerneldecl.policies.cpu.time_model import Work, busiest_share, predicted_secs

CORE_DRAM_BYTES_PER_S = 12e9
"""What one core can have in flight: by Little's law, some 16 lines of 64 bytes every 85 ns (McCalpin, on single-core bandwidth, 2010)."""
LOOP_CYCLES = 1.0
"""Of one turn of a loop around the work in it: counter, comparison, branch."""
COMBINE_CYCLES = 3.0
"""Latency of an addition, which the lanes of a vector pay one after another when they are combined."""


@dataclass(frozen=True)
class Stream:
    """What a kernel moves and computes, whoever does it."""

    moved_bytes: int
    """Each operand once."""
    cycles: float
    """Of all cores together."""
    tasks: int
    """Equal parts that can run at once."""


def stream_secs(cpu: Cpu, stream: Stream, *, is_parallel: bool) -> float:
    """Return the roofline time: the slowest of compute, each cache and memory, plus the start of threads.

    Data come from the first level that holds all of them, as they do when a kernel runs again on the same operands.
    """
    share = busiest_share(stream.tasks, cpu.cores) if is_parallel else 1.0
    own_bytes = stream.moved_bytes * share
    is_in_dram = stream.moved_bytes > max(cpu.l3_bytes, cpu.l2_bytes)
    # A core that works alone does not draw what the whole socket can.
    alone = max(1.0, share * cpu.dram_bytes_per_s / CORE_DRAM_BYTES_PER_S)
    work = Work(
        compute_cycles=stream.cycles * share,
        l2_bytes=own_bytes if own_bytes > cpu.l1d_bytes else 0.0,
        l3_bytes=own_bytes if own_bytes > cpu.l2_bytes and cpu.l3_bytes else 0.0,
        dram_bytes=stream.moved_bytes * alone if is_in_dram else 0.0,
        parallel_regions=int(is_parallel),
    )
    return predicted_secs(cpu, work)


def access_cycles(cpu: Cpu, nbytes: float) -> float:
    """Return the cycles in which one core loads or stores that many bytes in vectors, from its first cache."""
    return nbytes / cpu.l1_bytes_per_cycle


def vector_cycles(cpu: Cpu, operations: float) -> float:
    """Return the cycles of that many operations on whole vectors."""
    return operations / cpu.fma_per_cycle


def moved_bytes(space: IterSpace) -> int:
    """Return the bytes of all arguments together."""
    accesses = {access.operand: access for block in space.blocks for access in (*block.reads, *block.writes)}
    arguments = {*space.inputs, *space.outputs}
    return sum(operand_bytes(access) for operand, access in accesses.items() if operand in arguments)


def operand_bytes(access: Access) -> int:
    return math.prod(access.shape) * dtype_bytes(access.dtype)


def points(block: Block, kind: str = "") -> int:
    """Return the points of a block's iteration space, or of its axes of one kind."""
    return math.prod(axis.extent for axis in block.axes if kind in {"", axis.kind})


def only_reduction(space: IterSpace) -> tuple[Block, tuple[Block, ...]] | None:
    """Return the one reduction and the blocks after it, None unless these compute one element for each of its results."""
    found = [at for at, block in enumerate(space.blocks) if block.is_reduction]
    if len(found) != 1:
        return None
    block, *after = space.blocks[found[0] :]
    is_elementwise = all(points(later) == points(block, "spatial") for later in after)
    return (block, tuple(after)) if is_elementwise and block.reads else None


def largest(block: Block) -> Access:
    """Return the operand of the most elements that a block reads."""
    return max(block.reads, key=lambda access: math.prod(access.shape))


def contiguous_axis(block: Block, access: Access) -> int | None:
    """Return the axis along which an operand's neighbours in memory are read, None where there is no such axis."""
    for index, extent in zip(reversed(access.index), reversed(access.shape), strict=True):
        moving = [(axis, step) for axis, step in index or () if block.axes[axis].extent > 1]
        if moving or index is None:
            return next((axis for axis, step in moving if step == 1), None)
        if extent > 1:
            return None
    return None


def ranked(template: str, timed: Iterable[tuple[Mapping[str, Value], float]], top_k: int) -> tuple[Proposal, ...]:
    """Return distinct candidates of one template, least predicted time first."""
    secs = {Candidate.of(template, params): predicted for params, predicted in timed}
    proposals = [Proposal(candidate, predicted) for candidate, predicted in secs.items()]
    # The order in which a policy lists them decides between equals.
    return tuple(sorted(proposals, key=lambda proposal: proposal.predicted_secs)[:top_k])
