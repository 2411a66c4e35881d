"""Owns the search space of a computation: every candidate that its policies could propose, and the order in which they rank them.

Knows nothing of tuners, of measurements or of how a policy enumerates.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from kerneldecl.model import Arch, Candidate, IterSpace, Proposal, Value

EVERY = 1 << 40
"""A `top_k` above the size of any space."""


@dataclass(frozen=True)
class SearchSpace:
    """What tuners search: the space of the first policy that takes the computation.

    `candidates` is the space whatever its policy thinks of it, `ranked` what the policy proposes of it, best first.
    """

    space: IterSpace
    arch: Arch
    top_k: int
    policies: tuple[tuple[str, ModuleType], ...]
    """Names and modules of the policies that rank, in the order in which they are asked."""

    @functools.cached_property
    def _taking(self) -> tuple[str, ModuleType] | None:
        return next((each for each in self.policies if each[1].propose(self.space, self.arch, 1)), None)

    @property
    def policy(self) -> str:
        """Name of the policy whose space it is; empty where none takes the computation."""
        return self._taking[0] if self._taking else ""

    @functools.cached_property
    def ranked(self) -> tuple[Proposal, ...]:
        """All that the policy proposes, best first by its model."""
        return tuple(self._taking[1].propose(self.space, self.arch, EVERY)) if self._taking else ()

    @functools.cached_property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every candidate, each once, in an order that does not depend on any model."""
        if self._taking is None:
            return ()
        enumerate_all = getattr(self._taking[1], "candidates", None)
        found = enumerate_all(self.space, self.arch) if enumerate_all else (proposal.candidate for proposal in self.ranked)
        return tuple(sorted(dict.fromkeys(itertools.chain(found, (each.candidate for each in self.ranked))), key=_order))

    @functools.cached_property
    def predicted(self) -> Mapping[Candidate, float]:
        """Seconds that the policy expects of the candidates that it ranks."""
        return {proposal.candidate: proposal.predicted_secs for proposal in self.ranked}

    @functools.cached_property
    def templates(self) -> tuple[str, ...]:
        """Templates that the candidates name."""
        return tuple(sorted({candidate.template for candidate in self.candidates}))

    def proposal(self, candidate: Candidate) -> Proposal:
        """Return a candidate with the time that the policy expects; where its model says nothing, the slowest that it expects of any."""
        slowest = max(self.predicted.values(), default=0.0)
        return Proposal(candidate, self.predicted.get(candidate, slowest))

    def choices(self, template: str) -> Mapping[str, Sequence[Value]]:
        """Return the values that each parameter of a template takes anywhere in the space; nothing for a template that is not in it."""
        return self._choices.get(template, {})

    @functools.cached_property
    def _choices(self) -> Mapping[str, Mapping[str, Sequence[Value]]]:
        found: dict[str, dict[str, dict[Value, None]]] = {}
        for candidate in self.candidates:
            of_template = found.setdefault(candidate.template, {})
            for name, value in candidate.params:
                of_template.setdefault(name, {})[value] = None
        return {template: {name: sorted(values, key=_value_order) for name, values in params.items()} for template, params in found.items()}


def _order(candidate: Candidate) -> tuple[str, list[tuple[str, tuple[int, float, str]]]]:
    """Return a key that orders candidates of several templates: numbers by their size, everything else by its text."""
    return candidate.template, [(name, _value_order(value)) for name, value in candidate.params]


def _value_order(value: object) -> tuple[int, float, str]:
    return (0, float(value), "") if isinstance(value, int | float) else (1, 0.0, repr(value))
