"""Owns the time model of a CPU: the slowest of compute and each level of the memory, plus the start of threads.

Knows nothing of operators, templates or TVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kerneldecl.model import Access, Block, Candidate, Cpu, IterSpace, Proposal, dtype_bytes

_ProblemT = TypeVar("_ProblemT")
_TilingT = TypeVar("_TilingT")

HALF_PAGE_BYTES = 2048
"""Stride in bytes from which on rows are neither prefetched as one stream nor spread over the sets of a cache."""
FMA_LATENCY_CYCLES = 4
"""Cycles from a fused multiply-add to the next one that uses its result (Agner Fog, instruction tables: Skylake, Zen 4)."""
TILE_SHAPES = 10
"""Register tiles that are combined with every cache blocking; the others compute more slowly whatever the caches do."""
SAME_TILE = 3
"""Candidates of one register tile that come before those of others: the model is surer of caches than of register tiles."""


@dataclass(frozen=True)
class Work:
    """What the busiest core does between the start and the end of a kernel."""

    compute_cycles: float = 0.0
    l2_bytes: float = 0.0
    """Bytes moved between this core's L1 and L2."""
    l3_bytes: float = 0.0
    """Bytes moved between this core's L2 and L3."""
    dram_bytes: float = 0.0
    """Bytes moved between DRAM and all cores together."""
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
    """Return the fraction of all work that the busiest core gets when equal tasks are dealt round robin."""
    return -(-tasks // cores) / tasks


def compute_lanes(cpu: Cpu, dtype: str) -> int:
    """Return how many results a vector register holds; those narrower than 4 bytes are computed as wide as that."""
    return max(1, cpu.vector_bytes // max(4, dtype_bytes(dtype)))


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


@dataclass(frozen=True)
class Estimate:
    """The predicted time of a candidate that keeps a register tile of accumulators."""

    candidate: Candidate
    secs: float
    moved_bytes: float
    """Bytes moved between all levels; they decide between candidates that are bound by arithmetic and thus equally fast."""
    tile: tuple[int, int]


def estimate_of(cpu: Cpu, candidate: Candidate, works: Sequence[Work], tile: tuple[int, int]) -> Estimate:
    """Return the estimate of a candidate whose kernels run one after another, each a roofline of `predicted_secs`."""
    secs = sum(predicted_secs(cpu, work) for work in works)
    moved_bytes = sum(work.l2_bytes + work.l3_bytes + work.dram_bytes for work in works)
    return Estimate(candidate, secs, moved_bytes, tile)


def proposals_of(
    problem: _ProblemT | None,
    cpu: Cpu,
    tilings: Callable[[_ProblemT, Cpu], Iterable[_TilingT]],
    estimate: Callable[[_ProblemT, _TilingT, Cpu], Estimate],
) -> tuple[Proposal, ...]:
    """Return the tilings of a problem with the least predicted time, best first; nothing where there is no problem."""
    return () if problem is None else ranked(estimate(problem, tiling, cpu) for tiling in tilings(problem, cpu))


def ranked(estimates: Iterable[Estimate]) -> tuple[Proposal, ...]:
    """Return proposals, best first, except that a register tile's candidates after its `SAME_TILE` best come last.

    The model is surer of caches than of the code that a compiler makes of a register tile, so the first few should differ in it.
    """
    seen: dict[tuple[int, int], int] = {}
    first: list[Proposal] = []
    later: list[Proposal] = []
    for estimate in sorted(estimates, key=lambda e: (e.secs, e.moved_bytes, e.candidate.params)):
        seen[estimate.tile] = seen.get(estimate.tile, 0) + 1
        (first if seen[estimate.tile] <= SAME_TILE else later).append(Proposal(estimate.candidate, estimate.secs))
    return (*first, *later)


def spread_cycles(cpu: Cpu, stride_bytes: int, row_bytes: int) -> float:
    """Return the cycles that reading one row of a panel costs beyond its load, where rows lie `stride_bytes` from one another.

    From `HALF_PAGE_BYTES` on that is one cycle per cache line, measured on a Zen 4 in November 2026 with strides of 2 and 4 KiB.
    """
    return -(-row_bytes // cpu.line_bytes) if stride_bytes >= HALF_PAGE_BYTES else 0.0


def two_operand_reduction(space: IterSpace) -> Block | None:
    """Return the function's only reduction where it reads two operands, as GEMMs and convolutions do, or None."""
    reductions = [block for block in space.blocks if block.is_reduction]
    return reductions[0] if len(reductions) == 1 and len(reductions[0].reads) == 2 else None


def plain_axes(access: Access) -> list[int] | None:
    """Return the axes that index an operand's dimensions, constants left out; None where one is not a plain axis.

    An axis of extent 1 is a constant.
    """
    plain = [dim[0][0] for dim in access.index if dim is not None and len(dim) == 1 and dim[0][1] == 1]
    constant = sum(dim == () for dim in access.index)
    return plain if len(plain) + constant == len(access.index) else None


def output_axes(block: Block) -> list[int] | None:
    """Return the spatial axis of each dimension that a block writes, or None where they do not correspond one to one."""
    spatial = [i for i, axis in enumerate(block.axes) if axis.kind == "spatial"]
    if len(block.writes) != 1 or len(block.writes[0].index) != len(spatial):
        return None
    named = plain_axes(block.writes[0])
    units = [axis for axis in spatial if block.axes[axis].extent == 1]
    if named is None or sorted({*named, *units}) != spatial:
        return None
    unit_axes = iter(units)
    return [dim[0][0] if dim else next(unit_axes) for dim in block.writes[0].index if dim is not None]
