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

STEPS = (8, 16, 4, 1)
"""Rows of a matrix with contiguous columns that are added up together, so that partial results are loaded and stored once for all of them.

Measured on an AVX-512 Xeon in November 2026, 2048 x 1000 from L3, one core: 1.7 ms with 1 row, 0.7 with 4, 0.45 with 8 and with 16.
"""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return schedules of a matrix-vector multiplication; nothing where the matrix is used more often than a vector would."""
    block = matrix_vector(space)
    return () if block is None else ranked("cpu_gemv", tilings(space, block, arch.the_cpu, VECTORS, ROWS, STEPS), top_k)
