"""Owns how a matrix-vector product should be cut into rows, vectors, columns and chunks on a CPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies.shared.reduction import MAX_REUSE, across, along, is_across, reuse
from kerneldecl.policies.shared.traffic import only_reduction, ranked

TEMPLATES = ("cpu_gemv",)
AUTO = {"cpu": 30}

VECTORS = (4, 2, 1)
ROWS = (1, 2, 4)


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return ways to multiply a matrix by a vector; nothing where the matrix is used more often than a vector would."""
    found = only_reduction(space)
    if found is None or len({access.operand for access in found[0].reads}) < 2 or reuse(found[0]) > MAX_REUSE:
        return ()
    block, _ = found
    timed = across(space, block, arch.the_cpu) if is_across(block) else along(space, block, arch.the_cpu, VECTORS, ROWS)
    return ranked("cpu_gemv", timed, top_k)
