"""Owns how a reduction should be cut into vectors, columns and chunks on a CPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies.shared.reduction import MAX_REUSE, across, along, is_across, reuse
from kerneldecl.policies.shared.traffic import only_reduction, ranked

TEMPLATES = ("cpu_reduce",)
AUTO = {"cpu": 50}

VECTORS = (4, 8, 2, 1)


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return ways to compute the one reduction of a function; nothing where there are several, or operands are used again and again."""
    found = only_reduction(space)
    if found is None or reuse(found[0]) > MAX_REUSE:
        return ()
    block, _ = found
    timed = across(space, block, arch.the_cpu) if is_across(block) else along(space, block, arch.the_cpu, VECTORS, rows=())
    return ranked("cpu_reduce", timed, top_k)
