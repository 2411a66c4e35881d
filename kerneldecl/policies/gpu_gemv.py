"""Owns how a matrix-vector multiplication (GEMV) should be cut into threads, rows, columns and chunks on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies.gpu.time_model import ranked
from kerneldecl.policies.gpu_reduce import tilings
from kerneldecl.policies.shared.reduction import matrix_vector

TEMPLATES = ("gpu_gemv",)
AUTO = {"cuda": 30}

TILES = (1, 2, 4)
"""Rows that a thread computes together."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return schedules of a matrix-vector multiplication; nothing where the matrix is used more often than a vector would."""
    block = matrix_vector(space)
    if block is None:
        return ()
    rows = [axis for axis in block.axes if axis.kind == "spatial" and axis.extent > 1]
    # In a batch, neighbouring rows may belong to different vectors.
    tiles = TILES if len(rows) <= 1 else TILES[:1]
    return ranked("gpu_gemv", arch.the_gpu, tilings(space, block, arch.the_gpu, tiles), top_k)
