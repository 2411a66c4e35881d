"""Owns how a reduction should be cut into vectors, columns and chunks on a CPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies.cpu.reduction import tilings
from kerneldecl.policies.cpu.traffic_secs import ranked
from kerneldecl.policies.shared.reduction import streamed_reduction

TEMPLATES = ("cpu_reduce",)
AUTO = {"cpu": 50}

VECTORS = (4, 8, 2, 1)
"""Vectors of partial results that a reduction along memory keeps."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return schedules of the one reduction of a function; nothing where there are several, or operands are used again and again."""
    block = streamed_reduction(space)
    return () if block is None else ranked("cpu_reduce", tilings(space, block, arch.the_cpu, VECTORS), top_k)
