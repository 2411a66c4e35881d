"""Owns whether rows added at indices should run on one core of a CPU or on all.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kerneldecl.analysis.cpu_params import CpuRowsParams
from kerneldecl.analysis.scatter import scatter_of, takes
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal
from kerneldecl.policies.cpu.traffic_secs import Stream, Timed, ranked, stream_secs
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATES = ("cpu_scatter_add",)
AUTO = {"cpu": 36}
HAS_TRACES = False

LOOK_CYCLES = 2.0
"""Cycles in which a task looks at an index."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return both ways, the one with the least predicted time first; nothing for what does not add rows at indices."""
    sizes = scatter_of(space)
    return () if sizes is None or not takes(sizes) else ranked("cpu_scatter_add", _timed(space, arch.the_cpu), top_k)


def _timed(space: IterSpace, cpu: Cpu) -> Iterator[Timed]:
    sizes = scatter_of(space)
    assert sizes is not None
    added = (sizes.rows + sizes.updates) * sizes.columns
    for is_parallel in (True, False):
        tasks = 2 * cpu.cores if is_parallel else 1
        stream = Stream(moved_bytes(space), added + tasks * sizes.updates * LOOK_CYCLES, tasks)
        yield CpuRowsParams(is_parallel)._asdict(), stream_secs(cpu, stream, is_parallel=is_parallel)
