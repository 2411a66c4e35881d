"""Owns how much of a search's budget is left: candidates, seconds, and whether the best is near enough to the device's peak.

Knows nothing of policies, of how candidates are measured or of who wins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kerneldecl.limits import Budget
from kerneldecl.model import Trial

AT_ONCE = 8
"""Candidates that are evaluated together where the search may end after any of them."""
Item = TypeVar("Item")


class Allowance:
    """What is left of a budget. It counts from when it is made."""

    def __init__(self, budget: Budget = (), least_secs: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the seconds of a call that the device's peaks allow at least."""
        limits = dict(budget)
        self._trials = limits.get("trials", math.inf)
        self._until = clock() + limits.get("seconds", math.inf)
        self._enough_secs = least_secs / limits["stop_at"] if "stop_at" in limits else 0.0
        self._may_end_early = len(limits.keys() & {"seconds", "stop_at"}) > 0
        self._clock = clock

    def admitted(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the first of the items that may be evaluated together now; none once the budget is spent."""
        if self._clock() >= self._until:
            return ()
        most = min(self._trials, AT_ONCE) if self._may_end_early else self._trials
        return items[: int(min(most, len(items)))]

    def note(self, trials: Iterable[Trial]) -> None:
        """Count what was tried."""
        for trial in trials:
            self._trials -= 1
            if trial.samples and trial.run_secs <= self._enough_secs:
                self._trials = 0
        self._trials = max(self._trials, 0)
