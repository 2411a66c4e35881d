"""Owns how a chain of reductions and elementwise steps over rows should be computed on a CPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies.cpu.time_model import compute_lanes
from kerneldecl.policies.shared.reduction import is_across
from kerneldecl.policies.shared.traffic import (
    COMBINE_CYCLES,
    LOOP_CYCLES,
    Stream,
    access_cycles,
    moved_bytes,
    only_reduction,
    points,
    ranked,
    stream_secs,
    vector_cycles,
)

TEMPLATES = ("cpu_rowwise",)
AUTO = {"cpu": 40}

VECTORS = (1, 2, 4)


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return how many vectors of partial results to keep; nothing where reductions do not share their rows, the leading axes."""
    reductions = [block for block in space.blocks if block.is_reduction]
    rows = {tuple(axis.extent for axis in block.axes if axis.kind == "spatial") for block in reductions}
    # For nothing but a reduction there are better ways.
    if only_reduction(space) is not None or len(rows) != 1 or any(not block.reads or is_across(block) for block in reductions):
        return ()
    (shape,) = rows
    last = space.blocks[-1]
    if not shape or tuple(axis.extent for axis in last.axes[: len(shape)]) != shape:
        return ()
    cpu, timed = arch.the_cpu, []
    for vectors, is_parallel in itertools.product(VECTORS, (True, False)):
        cycles = 0.0
        for block in space.blocks:
            lanes = compute_lanes(cpu, block.writes[0].dtype)
            turns = points(block) / lanes
            operations = vector_cycles(cpu, turns * block.flops_per_point)
            accesses = access_cycles(cpu, turns * cpu.vector_bytes * (len(block.reads) + len(block.writes)))
            latency = turns / vectors * COMBINE_CYCLES if block.is_reduction else 0.0
            combining = points(block, "spatial") * (vectors - 1 + lanes) * LOOP_CYCLES if block.is_reduction else 0.0
            cycles += max(operations, accesses, latency) + combining
        tasks = points(reductions[0], "spatial")
        if not is_parallel or tasks > 1:
            secs = stream_secs(cpu, Stream(moved_bytes(space), cycles, tasks), is_parallel=is_parallel)
            timed.append(({"vectors": vectors, "parallel": is_parallel}, secs))
    return ranked("cpu_rowwise", timed, top_k)
