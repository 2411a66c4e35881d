"""Owns the policy `default`: the one schedule that TVM applies where nobody has tuned, dlight's.

Knows nothing of TVM or of how long it takes: every computation has this one candidate.
"""

from __future__ import annotations

from kerneldecl.model import Arch, Candidate, IterSpace, Proposal
from kerneldecl.policies.shared.traffic import moved_bytes

TEMPLATES = ("tvm_default",)
KINDS = ("cpu", "cuda")


def propose(space: IterSpace, arch: Arch, top_k: int) -> tuple[Proposal, ...]:
    """Return TVM's default, expected to take as long as its memory traffic does at least."""
    return (Proposal(Candidate.of("tvm_default", {}), moved_bytes(space) / arch.device.dram_bytes_per_s),)[:top_k]
