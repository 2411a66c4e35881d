"""Owns the tuner `nearest`: what was fastest for the nearest computations that were measured, of other shapes or on other archs.

Knows nothing of records, or of what makes a computation near: it is given configurations, and fits each to this search space.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from kerneldecl.model import Candidate, Value
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.tuning import Idea, Recorded

IS_TUNER = True
READS_RECORDS = True
TRIALS = 0
OTHER = 8.0
"""How far a word, a truth value or a list is from another one: as far as a number is from one 256 times as large."""


@dataclass(frozen=True)
class Options:
    """What `nearest` takes besides a budget."""

    count: Annotated[int, Ge(1), Le(64)] = 4
    """Configurations that it takes."""

    def problems(self) -> Iterator[str]:
        yield from ()


def ideas(search: SearchSpace, options: Options, recorded: Sequence[Recorded]) -> tuple[Idea, ...]:
    """Return the first configurations, each as the candidate of this space that is most like it, and each candidate once."""
    found: dict[Candidate, Idea] = {}
    for known in recorded:
        candidate = fitted(search, known.candidate)
        if candidate and len(found) < options.count:
            found.setdefault(candidate, Idea(search.proposal(candidate), known.source))
    return tuple(found.values())


def fitted(search: SearchSpace, candidate: Candidate) -> Candidate | None:
    """Return the candidate of the space with the most similar parameters, of equally similar ones that which the model prefers; None
    where the space has none of its template."""
    alike = [each for each in search.candidates if each.template == candidate.template]
    worst = max(search.predicted.values(), default=0.0)
    return min(alike, key=lambda each: (distance(each, candidate), search.predicted.get(each, worst)), default=None)


def distance(one: Candidate, other: Candidate) -> float:
    """Return how much the parameters of two candidates differ: sizes by the logarithm of their ratio."""
    mine, theirs = dict(one.params), dict(other.params)
    return sum(_between(mine.get(name), theirs.get(name)) for name in mine.keys() | theirs.keys())


def _between(one: Value | None, other: Value | None) -> float:
    if one == other and type(one) is type(other):
        return 0.0
    if type(one) is int and type(other) is int and one >= 0 and other >= 0:
        return abs(math.log2((1 + one) / (1 + other)))
    return OTHER
