"""Owns the time model of CPU kernels that touch each operand once: bytes through the caches, cycles of vector code, threads.

Knows nothing of operators, templates or TVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kerneldecl.model import Candidate, Cpu, Proposal, Value
from kerneldecl.policies.cpu.time_model import Work, busiest_share, predicted_secs

CORE_DRAM_BYTES_PER_S = 12e9
"""Bytes that one core can load from DRAM in a second: by Little's law, some 16 lines of 64 bytes every 85 ns (McCalpin, on single-core
bandwidth, 2010)."""
LOOP_CYCLES = 1.0
"""Cycles of one turn of a loop besides the work in it: counter, comparison, branch."""
COMBINE_CYCLES = 3.0
"""Latency of an addition in cycles, which the lanes of a vector pay one after another when they are combined."""

Timed = tuple[Mapping[str, Value], float]
"""A template's parameters and their predicted seconds."""


@dataclass(frozen=True)
class Stream:
    """What a kernel moves and computes, on however many cores."""

    moved_bytes: int
    """Bytes of all operands, each counted once."""
    cycles: float
    """Cycles of all cores together."""
    tasks: int
    """Equal shares of the work that can run at once."""


def stream_secs(cpu: Cpu, stream: Stream, *, is_parallel: bool) -> float:
    """Return the roofline time: the slowest of compute, each cache and memory, plus the start of threads.

    Data come from the first level that holds all of them, as they do when a kernel runs again on the same operands.
    """
    share = busiest_share(stream.tasks, cpu.cores) if is_parallel else 1.0
    own_bytes = stream.moved_bytes * share
    is_in_dram = stream.moved_bytes > max(cpu.l3_bytes, cpu.l2_bytes)
    # One core cannot draw the bandwidth of the whole socket.
    slowdown = max(1.0, share * cpu.dram_bytes_per_s / CORE_DRAM_BYTES_PER_S)
    work = Work(
        compute_cycles=stream.cycles * share,
        l2_bytes=own_bytes if own_bytes > cpu.l1d_bytes else 0.0,
        l3_bytes=own_bytes if own_bytes > cpu.l2_bytes and cpu.l3_bytes else 0.0,
        dram_bytes=stream.moved_bytes * slowdown if is_in_dram else 0.0,
        parallel_regions=int(is_parallel),
    )
    return predicted_secs(cpu, work)


def access_cycles(cpu: Cpu, nbytes: float) -> float:
    """Return the cycles in which one core loads or stores that many bytes in vectors, from its first cache."""
    return nbytes / cpu.l1_bytes_per_cycle


def vector_cycles(cpu: Cpu, operations: float) -> float:
    """Return the cycles of that many operations on whole vectors."""
    return operations / cpu.fma_per_cycle


def ranked(template: str, timed: Iterable[Timed], top_k: int) -> tuple[Proposal, ...]:
    """Return distinct candidates of one template, least predicted time first."""
    secs = {Candidate.of(template, params): predicted for params, predicted in timed}
    proposals = [Proposal(candidate, predicted) for candidate, predicted in secs.items()]
    # The order in which a policy lists them decides between equals.
    return tuple(sorted(proposals, key=lambda proposal: proposal.predicted_secs)[:top_k])
