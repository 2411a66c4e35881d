"""Owns what a policy and a template must have: the Protocols that their modules fulfil.

Knows nothing of how plug-ins are found or loaded, nor of TVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from kerneldecl.model import Arch, Candidate, IterSpace, Proposal, Trial, Value
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.tuning import Idea, Recorded


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


class Enumerating(Policy, Protocol):
    """A policy whose search space is wider than what it ranks."""

    def candidates(self, space: IterSpace, arch: Arch) -> Iterable[Candidate]:
        """Return every candidate that its templates take for a computation, whatever its model thinks of them, in any order."""
        ...


class Tuner(Protocol):
    """A policy that searches: its file says `IS_TUNER = True` on a line of its own, and `KINDS` where it is not for every kind of arch."""

    Options: type
    """A frozen dataclass with what workloads.toml may say besides a budget, each with a default. Its `problems()`, if there is such a
    method, yields what is wrong with values that are right one by one."""
    TRIALS: int
    """Candidates that it tries where no budget says otherwise; 0: as many as it proposes."""

    ENGINE: str
    """Module that answers in its place, where TVM, arrays or the store are needed, if any. Its `ask` gets `spec`, which names the
    computation and the store, and `is_over`, with which it gets the results of its last batch."""

    def ask(self, search: SearchSpace, options: Any, trials: Sequence[Trial]) -> Sequence[Proposal]:
        """Return the next candidates, given all trials so far in the order of their proposals, those of other policies first; nothing
        once the search is over.

        Pure: asked again with the same trials, it answers the same. So a search that was killed goes on where it was.
        """
        ...


class RecordReader(Protocol):
    """A tuner that is given what was fast for like computations: its file also says `READS_RECORDS = True` on a line of its own."""

    Options: type
    TRIALS: int

    def ideas(self, search: SearchSpace, options: Any, recorded: Sequence[Recorded]) -> Sequence[Idea]:
        """Return candidates of the space with their sources, given recorded configurations, those of the nearest computations first."""
        ...


class Template(Protocol):
    """A module in templates/: applies a candidate's parameters to a computation."""

    def apply(self, mod: Any, params: Mapping[str, Value], arch: Arch) -> Any:
        """Return a `tvm.s_tir.Schedule` of the IRModule's `main`, or an IRModule with a PrimFunc that no trace leads to; None where the
        template does not apply. `mod` is canonical TensorIR and is not changed."""
        ...
