"""Owns how much of a search's budget is left: candidates, seconds, and whether the best is near enough to the device's peak.

Knows nothing of policies, of how candidates are measured or of who wins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TypeAlias, TypeVar

from kerneldecl.limits import Budget
from kerneldecl.model import Trial

AT_ONCE = 8
"""Candidates that are evaluated together where the search may end after any of them."""
Item = TypeVar("Item")


class Ending(Enum):
    """What ends a search from outside."""

    SPENT = "spent"
    """A budget that it shares with others."""
    INTERRUPTED = "interrupted"
    """The user, who wants what is there."""


EndedBy: TypeAlias = "Callable[[], Ending | None]"
"""Says whether a search is to end with what it has, and why."""


class Allowance:
    """What is left of a budget. It counts from when it is made."""

    def __init__(
        self,
        budget: Budget = (),
        least_secs: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        ended_by: EndedBy | None = None,
    ) -> None:
        """Take the seconds of a call that the device's peaks allow at least, and what may end the search from outside."""
        limits = dict(budget)
        self._trials = limits.get("trials", math.inf)
        self._until = clock() + limits.get("seconds", math.inf)
        self._enough_secs = least_secs / limits["stop_at"] if "stop_at" in limits else 0.0
        self._may_end_early = ended_by is not None or len(limits.keys() & {"seconds", "stop_at"}) > 0
        self._clock = clock
        self._ended_by = ended_by or (lambda: None)
        self.was_cut = False
        """Whether an interrupt has ended the search."""

    def is_spent(self) -> bool:
        """Say whether nothing more may be evaluated."""
        if self._trials < 1 or self._clock() >= self._until:
            return True
        ending = self._ended_by()
        self.was_cut = self.was_cut or ending is Ending.INTERRUPTED
        return ending is not None

    def admitted(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the first of the items that may be evaluated together now; none once the budget is spent."""
        if self.is_spent():
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
