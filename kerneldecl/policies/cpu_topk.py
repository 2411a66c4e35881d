"""Owns whether sorted rows should run on one core of a CPU or on all.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kerneldecl.analysis.cpu_params import CpuRowsParams
from kerneldecl.analysis.row_sort import top_of
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu.traffic_secs import Stream, Timed, ranked, stream_secs
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATES = ("cpu_topk",)
AUTO = {"cpu": 36}
HAS_TRACES = False

STEP_CYCLES = 8.0
"""Cycles in which an element is compared, and in which it is moved once."""
MOST_INSERTED = 64
"""Results of rows that are not sorted whole."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return both ways, the one with the least predicted time first; nothing for what does not sort rows."""
    return () if top_of(space) is None else ranked("cpu_topk", _timed(space, arch.the_cpu), top_k)


def _timed(space: IterSpace, cpu: Cpu) -> Iterator[Timed]:
    sizes = top_of(space)
    assert sizes is not None
    is_inserted = sizes.results <= min(MOST_INSERTED, sizes.extent // 2)
    turns = 1 if is_inserted else max(1, sizes.extent.bit_length())
    cycles = sizes.rows * sizes.extent * STEP_CYCLES * turns
    for is_parallel in (True, False):
        secs = stream_secs(cpu, Stream(moved_bytes(space), cycles, sizes.rows), is_parallel=is_parallel)
        yield CpuRowsParams(is_parallel)._asdict(), secs
