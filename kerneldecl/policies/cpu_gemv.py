"""Owns how a matrix-vector multiplication (GEMV) should be cut into rows, vectors, columns and chunks on a CPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies.cpu.reduction import tilings
from kerneldecl.policies.cpu.traffic_secs import ranked
from kerneldecl.policies.shared.reduction import matrix_vector

TEMPLATES = ("cpu_gemv",)
AUTO = {"cpu": 30}

VECTORS = (4, 2, 1)
"""Vectors of partial results that a row keeps."""
ROWS = (1, 2, 4)
"""Rows that are computed together."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return schedules of a matrix-vector multiplication; nothing where the matrix is used more often than a vector would."""
    block = matrix_vector(space)
    return () if block is None else ranked("cpu_gemv", tilings(space, block, arch.the_cpu, VECTORS, ROWS), top_k)
