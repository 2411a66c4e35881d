"""Owns how a matrix-vector product should be cut into threads, rows, columns and chunks on a GPU, and what to try first.

Knows nothing of TVM or of how the template applies it.
"""

from __future__ import annotations

from collections.abc import Sequence

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies._cpu_reduction import MAX_REUSE, reuse
from kerneldecl.policies._cpu_traffic import only_reduction
from kerneldecl.policies._gpu_model import ranked
from kerneldecl.policies.gpu_reduce import cuts

TEMPLATES = ("gpu_gemv",)

TILES = (1, 2, 4)
"""Rows that a thread computes together."""


def propose(space: IterSpace, arch: Arch, top_k: int, measured: Sequence[object]) -> tuple[Proposal, ...]:
    """Return ways to multiply a matrix by a vector; nothing where the matrix is used more often than a vector would."""
    found = only_reduction(space)
    if measured or found is None or len({access.operand for access in found[0].reads}) < 2 or reuse(found[0]) > MAX_REUSE:
        return ()
    # The template has threads compute several rows only where rows are one axis.
    tiles = TILES if sum(axis.kind == "spatial" for axis in found[0].axes) == 1 else TILES[:1]
    return ranked("gpu_gemv", arch.the_gpu, cuts(space, found[0], arch.the_gpu, tiles), top_k)
