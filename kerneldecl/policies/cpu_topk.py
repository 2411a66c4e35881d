"""Owns how rows should be sorted on a CPU, and whether on one core or on all.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kerneldecl.analysis.cpu_row_sort import DIGIT_BITS, FORMS, CpuTopParams, digit_shifts, group_count
from kerneldecl.analysis.row_sort import TopSizes, top_of
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu.traffic_secs import Stream, Timed, ranked, stream_secs
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATES = ("cpu_topk",)
AUTO = {"cpu": 36}
HAS_TRACES = False

# Cycles, fitted to rows of 128 to 100 000 float32 on a core of a Xeon with AVX-512 that ran two threads.
STEP_CYCLES = 8.0
"""In which an element is compared, and in which it is moved once."""
COMPARE_CYCLES = 0.25
"""For two elements of a row, whatever a vector holds."""
COUNT_CYCLES = 10.0
"""Beside that, for an element that is compared with all."""
PASS_CYCLES = 10.0
"""For an element and one of its digits."""
SELECT_CYCLES = 4.0
"""For an element that is compared with a bound."""
DIGIT_CYCLES = 1.5
"""For a value of a digit."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the ways of sorting, the one with the least predicted time first; nothing for what does not sort rows."""
    return () if top_of(space) is None else ranked("cpu_topk", _timed(space, arch.the_cpu), top_k)


def _timed(space: IterSpace, cpu: Cpu) -> Iterator[Timed]:
    sizes = top_of(space)
    assert sizes is not None
    for form in FORMS:
        for is_parallel in (True, False):
            params = CpuTopParams(form, is_parallel)
            if params.fits(sizes):
                stream = Stream(moved_bytes(space), sizes.rows * _row_cycles(sizes, form), sizes.rows)
                yield params._asdict(), stream_secs(cpu, stream, is_parallel=is_parallel)


def _row_cycles(sizes: TopSizes, form: str) -> float:
    extent = sizes.extent
    if form == "count":
        return extent * (extent * COMPARE_CYCLES + COUNT_CYCLES)
    if form == "radix":
        return _radix_cycles(sizes, extent)
    if form == "select":
        return extent * SELECT_CYCLES + _radix_cycles(sizes, group_count(sizes)) + _radix_cycles(sizes, 1.5 * sizes.results)
    return extent * STEP_CYCLES * (1 if form == "insert" else max(1, extent.bit_length()))


def _radix_cycles(sizes: TopSizes, elements: float) -> float:
    return (elements * PASS_CYCLES + (1 << DIGIT_BITS) * DIGIT_CYCLES) * len(digit_shifts(sizes.dtype))
