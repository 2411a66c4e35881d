"""Owns the time model of a CPU: the slowest of compute and each level of the memory, plus the start of threads.

Knows nothing of operators, templates or TVM.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerneldecl.model import Cpu, dtype_bytes


@dataclass(frozen=True)
class Work:
    """What the busiest core does between the start and the end of a kernel."""

    compute_cycles: float = 0.0
    l2_bytes: float = 0.0
    """Moved between this core's first and second cache."""
    l3_bytes: float = 0.0
    """Moved between this core's second cache and the third."""
    dram_bytes: float = 0.0
    """Moved between memory and all cores together."""
    parallel_regions: int = 0


def predicted_secs(cpu: Cpu, work: Work) -> float:
    """Return the largest of compute time and each level's transfer time, plus the parallel regions' start.

    The roofline model (Williams, Waterman, Patterson, CACM 2009, section 3) with one roof for each cache level, as in
    the cache-aware variant (Ilic, Pratas, Sousa, IEEE CAL 2014): transfers of different levels overlap with arithmetic.
    """
    roofs = (
        work.compute_cycles / cpu.clock_hz,
        work.l2_bytes / (cpu.l2_bytes_per_cycle * cpu.clock_hz),
        work.l3_bytes / (cpu.l3_bytes_per_cycle * cpu.clock_hz),
        work.dram_bytes / cpu.dram_bytes_per_s,
    )
    return max(roofs) + work.parallel_regions * cpu.parallel_secs


def busiest_share(tasks: int, cores: int) -> float:
    """Return the part of all work that the busiest core gets when equal tasks are dealt out in turn."""
    return -(-tasks // cores) / tasks


def lanes_of(cpu: Cpu, dtype: str) -> int:
    """Return how many elements a vector register holds."""
    return max(1, cpu.vector_bytes // dtype_bytes(dtype))


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]
