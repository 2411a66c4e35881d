"""Owns how a chain of reductions and elementwise steps over rows should be computed on a CPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from kerneldecl.model import Arch, Block, Cpu, IterSpace, Proposal
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
from kerneldecl.policies.shared.reduction import rowwise_reductions
from kerneldecl.policies.shared.traffic import moved_bytes, points

TEMPLATES = ("cpu_rowwise",)
AUTO = {"cpu": 40}

VECTORS = (1, 2, 4)
"""Vectors of partial results that a reduction keeps."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return how many vectors of partial results to keep; nothing where reductions do not share their rows, the leading axes."""
    reductions = rowwise_reductions(space)
    return ranked("cpu_rowwise", _timed(space, reductions, arch.the_cpu), top_k) if reductions else ()


def _timed(space: IterSpace, reductions: Sequence[Block], cpu: Cpu) -> Iterator[Timed]:
    tasks = points(reductions[0], "spatial")
    for vectors, is_parallel in itertools.product(VECTORS, (True, False)):
        cycles = sum(_block_cycles(block, vectors, cpu) for block in space.blocks)
        if not is_parallel or tasks > 1:
            secs = stream_secs(cpu, Stream(moved_bytes(space), cycles, tasks), is_parallel=is_parallel)
            yield {"vectors": vectors, "parallel": is_parallel}, secs


def _block_cycles(block: Block, vectors: int, cpu: Cpu) -> float:
    lanes = compute_lanes(cpu, block.writes[0].dtype)
    turns = points(block) / lanes
    operations = vector_cycles(cpu, turns * block.flops_per_point)
    accesses = access_cycles(cpu, turns * cpu.vector_bytes * (len(block.reads) + len(block.writes)))
    latency = turns / vectors * COMBINE_CYCLES if block.is_reduction else 0.0
    combining = points(block, "spatial") * (vectors - 1 + lanes) * LOOP_CYCLES if block.is_reduction else 0.0
    return max(operations, accesses, latency) + combining
