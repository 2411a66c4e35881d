"""Owns what is expected of a search before it runs: which of its steps have to run, and for how many candidates.

Knows nothing of how they run. A candidate is scheduled to find out whether its code is new: what is told here is the most that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kerneldecl.model import Trial
from kerneldecl.store.results import Group
from kerneldecl.tuning.earlier import Known
from kerneldecl.tuning.race import ranking


class Forecast(NamedTuple):
    """What tuning an entry takes at most, where its first policy with anything to measure has a candidate that passes."""

    candidates: int
    """Candidates to compile, verify and time, each as far as its code is new."""
    verifies: bool
    """Whether a winner is to be verified by the reference of now."""

    def __str__(self) -> str:
        if self.candidates:
            return f"compile, verify and measure {self.candidates} candidates at most"
        return "verify the winner" if self.verifies else "from records"


def forecast(groups: Sequence[Group], known: Known, tolerance: float, *, may_have_more: bool = False) -> Forecast:
    """Return what is expected of a search through the groups, given what earlier searches know.

    `may_have_more` says that custom kernels compete, whose number only a worker can tell: one more candidate stands for them.
    """
    trials = known.trials(tolerance)
    for place, group in enumerate(groups):
        wanted = [proposal.candidate for proposal in group.proposals]
        unknown = sum(candidate not in trials for candidate in wanted) + (may_have_more and place == 0)
        if unknown:
            return Forecast(unknown, verifies=True)
        if timed := [trials[candidate] for candidate in wanted if trials[candidate].samples]:
            return Forecast(0, verifies=_winner(timed).error is None)
    return Forecast(int(may_have_more and not groups), verifies=False)


def _winner(timed: Sequence[Trial]) -> Trial:
    return ranking(list(timed))[0][0]
