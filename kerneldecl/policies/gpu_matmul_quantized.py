"""Owns how the policies for GEMM with packed 4-bit weights compete: by the times that they predict, so that measuring decides between them.

Knows nothing of tiles, of TVM or of what the policies know.
"""

from __future__ import annotations

import itertools

from kerneldecl.model import Arch, IterSpace, Proposal
from kerneldecl.policies import gpu_matmul_packed, wgmma_matmul_quantized
from kerneldecl.policies.gpu.gemm_tiles import interleaved

POLICIES = (gpu_matmul_packed, wgmma_matmul_quantized)
TEMPLATES = tuple(name for policy in POLICIES for name in policy.TEMPLATES)
AUTO = {"cuda": 5}
HAS_TRACES = False

RIVAL_SLOWDOWN = 1.35
"""How much slower than the other's a policy's best candidate may be predicted to take part: models err by some 30 % (H200, 2026-11)."""


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return what both policies propose: that with the least predicted time in its order, the other one's in every fourth place."""
    found = [(proposals[0].predicted_secs, proposals) for policy in POLICIES if (proposals := policy.propose(space, arch, top_k))]
    if not found:
        return ()
    (least, first), *others = sorted(found)
    rivals = [proposals for secs, proposals in others if secs <= RIVAL_SLOWDOWN * least]
    return tuple(itertools.islice(interleaved(first, itertools.chain(*rivals)), top_k))
