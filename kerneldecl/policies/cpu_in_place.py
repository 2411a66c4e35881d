"""Owns which vectors a CPU should try where a function writes its arguments at places that data tell, as a KV cache is.

Knows nothing of TVM or of how the template applies them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kerneldecl.model import Arch, Cpu, IterSpace, Proposal, dtype_bytes
from kerneldecl.policies.cpu.traffic_secs import LOOP_CYCLES, Stream, Timed, access_cycles, ranked, stream_secs, vector_cycles
from kerneldecl.policies.shared.traffic import contiguous_axis, moved_bytes, points, writes_at_data

TEMPLATES = ("cpu_in_place",)
AUTO = {"cpu": 62}

VECTORS = (1, 2, 4)
"""Vectors that are computed together."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return vectors, on one core and on all; nothing for a function that writes whole outputs."""
    return ranked("cpu_in_place", _vectors(space, arch.the_cpu), top_k) if writes_at_data(space) else ()


def _vectors(space: IterSpace, cpu: Cpu) -> Iterator[Timed]:
    (block,) = space.blocks
    lanes = max(1, cpu.vector_bytes // dtype_bytes(block.writes[0].dtype))
    is_contiguous = contiguous_axis(block, block.writes[0]) == len(block.axes) - 1
    widths = [lanes * vectors for vectors in VECTORS if lanes * vectors <= block.axes[-1].extent] if is_contiguous else []
    nbytes = moved_bytes(space)
    for width, is_parallel in itertools.product(widths or [1], (True, False)):
        turns = points(block) / width
        cycles = max(access_cycles(cpu, nbytes), vector_cycles(cpu, turns * block.flops_per_point)) + turns * LOOP_CYCLES
        tasks = max(1, points(block) // block.axes[-1].extent)
        if not is_parallel or tasks > 1:
            yield {"width": width, "parallel": is_parallel}, stream_secs(cpu, Stream(nbytes, cycles, tasks), is_parallel=is_parallel)
