"""Owns into which tasks and vectors a group norm should be cut on a CPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.analysis.cpu_params import CpuGroupNormParams
from kerneldecl.analysis.group_norm import GroupNormSizes, group_norm_of, takes
from kerneldecl.model import Arch, Cpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu.time_model import compute_lanes
from kerneldecl.policies.cpu.traffic_secs import (
    COMBINE_CYCLES,
    LOOP_CYCLES,
    Stream,
    Timed,
    access_cycles,
    ranked,
    stream_secs,
    vector_cycles,
)

TEMPLATES = ("cpu_group_norm",)
AUTO = {"cpu": 35}
HAS_TRACES = False

VECTORS = (4, 2, 1)
TASKS_OF_CORE = (4, 1, 16)
"""Tasks of an image for each core, at least: more have less to wait for at the end."""
INSTRUCTIONS = 9.0
"""Instructions for a vector: three that add it up, three that scale it, and conversions."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return the parameters with the least predicted time, best first; nothing for what is no group norm."""
    sizes = group_norm_of(space)
    return () if sizes is None or not takes(sizes) else ranked("cpu_group_norm", _timed(sizes, arch.the_cpu), top_k)


def _timed(sizes: GroupNormSizes, cpu: Cpu) -> Iterator[Timed]:
    lanes = compute_lanes(cpu, "float32")
    blocks = dict.fromkeys(max(1, -(-sizes.pixels // (cpu.cores * tasks))) for tasks in TASKS_OF_CORE) if sizes.is_channels_last else (1,)
    for vectors, block, is_parallel in itertools.product(VECTORS, blocks, (True, False)):
        tasks = sizes.images * (-(-sizes.pixels // block) if sizes.is_channels_last else sizes.channels)
        turns = sizes.elements / lanes
        nbytes = 2 * sizes.elements * dtype_bytes(sizes.dtype)
        latency = turns / vectors * COMBINE_CYCLES + tasks * vectors * lanes * LOOP_CYCLES
        cycles = max(vector_cycles(cpu, turns * INSTRUCTIONS), access_cycles(cpu, 1.5 * nbytes), latency)
        if not is_parallel or tasks > 1:
            params = CpuGroupNormParams(vectors, block, is_parallel)
            yield params._asdict(), stream_secs(cpu, Stream(nbytes, cycles, tasks), is_parallel=is_parallel)
