"""Owns how a matrix-vector product should be cut into threads, rows, columns and chunks on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies.gpu.time_model import ranked
from kerneldecl.policies.gpu_reduce import cuts
from kerneldecl.policies.shared.reduction import MAX_REUSE, reuse
from kerneldecl.policies.shared.traffic import only_reduction

TEMPLATES = ("gpu_gemv",)
AUTO = {"cuda": 30}

TILES = (1, 2, 4)
"""Rows that a thread computes together."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return ways to multiply a matrix by a vector; nothing where the matrix is used more often than a vector would."""
    found = only_reduction(space)
    if found is None or len({access.operand for access in found[0].reads}) < 2 or reuse(found[0]) > MAX_REUSE:
        return ()
    rows = [axis for axis in found[0].axes if axis.kind == "spatial" and axis.extent > 1]
    # Of a batch, neighbouring rows may belong to different vectors.
    tiles = TILES if len(rows) <= 1 else TILES[:1]
    return ranked("gpu_gemv", arch.the_gpu, cuts(space, found[0], arch.the_gpu, tiles), top_k)
