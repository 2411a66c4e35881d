"""Owns how well a policy's model orders candidates: where the fastest stands in its order, and what the first k of it would have given.

Knows nothing of how candidates are proposed or measured. Records hold all that it takes: no GPU is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kerneldecl.model import Candidate
from kerneldecl.store.keys import lines_of
from kerneldecl.store.local import Record
from kerneldecl.store.results import Group, TuneResult, groups_from_json

COUNTS = (1, 2, 5, 10, 20)
"""The k of best-of-k that reports show."""
_SUBJECT = ("computation", "arch.model", "search.generation", "search.protocol")
"""Lines of a tune manifest that two times must share to be compared."""
_LISTED = "candidates."


@dataclass(frozen=True)
class ModelRank:
    """A policy's order of the candidates of one entry that were timed."""

    policy: str
    rank: int
    """Place of the fastest in the policy's order, from 1."""
    timed: int
    """Candidates of the order that were timed."""
    proposed: int
    shares: tuple[float, ...]
    """The fastest's time divided by that of the best of the first k, for each k from 1: 1.0 where that is the fastest."""

    def share(self, count: int) -> float:
        """Return the best-of-k share; of all where fewer are known."""
        return self.shares[min(count, len(self.shares)) - 1]


@dataclass(frozen=True)
class Timed:
    """What was timed of one computation on one device."""

    secs: Mapping[Candidate, float]
    groups: tuple[Group, ...]
    """The proposals of then, best first, as far as their record is there."""


def model_rank(group: Group, secs: Mapping[Candidate, float]) -> ModelRank | None:
    """Return how a policy's order does by the times that are known; None where it proposes none of them."""
    return rank_of_order(group.policy, [proposal.candidate for proposal in group.proposals], secs)


def rank_of_order(policy: str, order: Sequence[Candidate], secs: Mapping[Candidate, float]) -> ModelRank | None:
    """Return how an order of candidates does by the times that are known; None where it has none of them.

    The fastest is that of all times, whoever has proposed it: an order that leaves it out does not reach 1.0, and its rank is one
    beyond its end.
    """
    found = [secs[candidate] for candidate in order if candidate in secs]
    if not found:
        return None
    best_secs, shares, best_so_far = min(secs.values()), [], math.inf
    for each in found:
        best_so_far = min(best_so_far, each)
        shares.append(best_secs / best_so_far)
    rank = shares.index(1.0) + 1 if 1.0 in shares else len(found) + 1
    return ModelRank(policy, rank, len(found), len(order), tuple(shares))


class TimedEarlier:
    """The times that tune records hold, with the proposals that led to them."""

    def __init__(self, tuned: Iterable[Record], proposed: Iterable[Record]) -> None:
        groups = {(group.policy, group.digest): group for record in proposed for group in groups_from_json(record.result)}
        self._timed: dict[tuple[str, ...], Timed] = {}
        for record in tuned:
            lines, result = lines_of(record.manifest), TuneResult(record.key, record.result)
            subject = tuple(lines.get(name, "") for name in _SUBJECT)
            before = self._timed.get(subject, Timed({}, ()))
            secs = {trial.candidate: trial.run_secs for trial in result.trials if trial.samples}
            named = [value for name, value in sorted(lines.items()) if name.startswith(f"{_LISTED}") and name.endswith(f".{result.policy}")]
            listed = [found for value in named if (found := groups.get((result.policy, value.strip('"').split()[-1])))]
            self._timed[subject] = Timed({**before.secs, **secs}, (*before.groups, *listed))

    def of(self, manifest: str) -> Timed:
        """Return what was timed of what a tune manifest describes, whatever templates, tools and lists of candidates it names."""
        lines = lines_of(manifest)
        return self._timed.get(tuple(lines.get(name, "") for name in _SUBJECT), Timed({}, ()))


@dataclass(frozen=True)
class Change:
    """An entry's order of now beside that of its records."""

    entry: str
    before: ModelRank
    now: ModelRank


def worse(changes: Sequence[Change], allowed: float) -> list[str]:
    """Return where orders of now are worse than those of the records by more than a share, as sentences.

    Judged are the geometric means over all entries, for each k; noise of one entry does not fail a policy.
    """
    found = []
    for count in COUNTS:
        before, now = (geometric_mean([getattr(each, side).share(count) for each in changes]) for side in ("before", "now"))
        if now < before * (1 - allowed):
            found.append(f"best of {count}: {now:.4f} of the fastest, {before:.4f} before")
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else 1.0
