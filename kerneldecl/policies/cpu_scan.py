"""Owns whether cumulative sum should run on one core of a CPU or on all.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kerneldecl.analysis.cpu_params import CpuRowsParams
from kerneldecl.analysis.long_scan import takes_any
from kerneldecl.analysis.scan import scan_of
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu.traffic_secs import Stream, Timed, ranked, stream_secs
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATES = ("cpu_scan",)
AUTO = {"cpu": 36}
HAS_TRACES = False

ADD_CYCLES = 4.0
"""Cycles of an addition that waits for the one before."""
MOST_COLUMNS = 16
"""Columns whose additions overlap."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return both ways, the one with the least predicted time first; nothing for what is no cumulative sum."""
    sizes = scan_of(space)
    return () if sizes is None or not takes_any(sizes) else ranked("cpu_scan", _timed(space, arch.the_cpu), top_k)


def _timed(space: IterSpace, cpu: Cpu) -> Iterator[Timed]:
    sizes = scan_of(space)
    assert sizes is not None
    cycles = sizes.elements * ADD_CYCLES / min(MOST_COLUMNS, sizes.inner)
    tasks = sizes.outer * -(-sizes.inner // 64)
    for is_parallel in (True, False):
        secs = stream_secs(cpu, Stream(moved_bytes(space), cycles, tasks), is_parallel=is_parallel)
        yield CpuRowsParams(is_parallel)._asdict(), secs
