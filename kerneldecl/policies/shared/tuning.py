"""Owns what tuners have in common: the size of a batch, what nobody has tried, order by a seed, configurations of records.

Knows nothing of any one tuner.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kerneldecl.model import Candidate, Proposal, Trial
from kerneldecl.policies.shared.search_space import SearchSpace

BATCH = 16
"""Candidates that a tuner asks for at once: as many as a race samples side by side, so that they are judged together."""


class Recorded(NamedTuple):
    """A configuration that was fast for a like computation, of another shape or on another arch."""

    candidate: Candidate
    source: Mapping[str, str]
    """Where it was measured: key of the tune record, arguments of the computation, model of the device."""


class Idea(NamedTuple):
    """A proposal, and where its configuration comes from."""

    proposal: Proposal
    source: Mapping[str, str]


def not_tried(search: SearchSpace, candidates: Iterable[Candidate], trials: Sequence[Trial], count: int = BATCH) -> tuple[Proposal, ...]:
    """Return the first of the candidates that have no trial, each once."""
    tried = {trial.candidate for trial in trials}
    new = (candidate for candidate in dict.fromkeys(candidates) if candidate not in tried)
    return tuple(search.proposal(candidate) for candidate in itertools.islice(new, count))


def shuffled(candidates: Iterable[Candidate], seed: int) -> list[Candidate]:
    """Return candidates in an order that depends on the seed and on each candidate alone: another candidate moves none of the others."""
    return sorted(candidates, key=lambda each: hashlib.sha256(f"{seed} {each.template} {each.params}".encode()).digest())


def generator(seed: int, trials: Sequence[Trial]) -> random.Random:
    """Return a generator that gives the same numbers for the same seed and as many trials, whatever process asks."""
    return random.Random(f"{seed} {len(trials)}")  # noqa: S311  no secret
