"""Owns what a policy and a template must have: the Protocols that their modules fulfil.

Knows nothing of how plug-ins are found or loaded, nor of TVM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from kerneldecl.model import Arch, IterSpace, Proposal, Trial, Value


class Policy(Protocol):
    """A module in policies/: proposes ranked candidates for a computation on an arch.

    Its file may say on lines of their own `AUTO = {"cuda": 40}` (the policy `auto` asks it for archs of this kind, lower numbers first)
    and `HAS_TRACES = False` (its kernels may be PrimFuncs without a trace, so the policy `traced` leaves it out).
    """

    TEMPLATES: Sequence[str]
    """Names of the templates that its candidates may name: their digests belong to the tune key."""

    def propose(self, space: IterSpace, arch: Arch, top_k: int) -> Sequence[Proposal]:
        """Return at most `top_k` distinct candidates, best first, each with its predicted seconds; nothing for what it does not take.

        Pure: it sees the iteration space and the arch's figures alone, and answers the same to the same question.
        """
        ...


class SearchPolicy(Policy, Protocol):
    """A policy that searches: it is asked again with what was measured, until it proposes nothing more."""

    def propose_next(self, space: IterSpace, arch: Arch, top_k: int, trials: Sequence[Trial]) -> Sequence[Proposal]:
        """Return the next candidates, given all trials so far in the order of their proposals; nothing once the search is over."""
        ...


class Template(Protocol):
    """A module in templates/: applies a candidate's parameters to a computation."""

    def apply(self, mod: Any, params: Mapping[str, Value], arch: Arch) -> Any:
        """Return a `tvm.s_tir.Schedule` of the IRModule's `main`, or an IRModule with a PrimFunc that no trace leads to; None where the
        template does not apply. `mod` is canonical TensorIR and is not changed."""
        ...
