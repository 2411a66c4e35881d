"""Owns the dealing of seconds that all entries share: the next batch goes to the entry whose calls have most time left to gain.

Knows nothing of how an entry is searched, or of what is recorded of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kerneldecl.planning.fallbacks import calls_of
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import reporter
from kerneldecl.tuning.budget import Ending
from kerneldecl.tuning.loop import Outcome, Steps
from kerneldecl.tuning.search import least_secs, tuning
from kerneldecl.tuning.task import Task

BACKWARD = 0.2
"""Weight of what the last batch has gained, beside what is left to gain: alpha of Ansor's task scheduler (Zheng et al., OSDI 2020)."""


@dataclass
class Search:
    """An entry's search, a batch at a time."""

    entry: EntryPlan
    task: Task
    calls: int
    """How often models call it."""
    least_secs: float
    """Time of a call that the device's peaks allow at least."""
    spent_secs: float = 0.0
    best_secs: float = 0.0
    """0 before anything is right."""
    gained_per_sec: float = 0.0
    """Seconds of a call that the last batch has saved, by the seconds that it took."""
    running: Steps[Outcome] | None = None

    @property
    def worth(self) -> float:
        """Seconds of the models' calls that a second of this search is expected to save; infinity while nothing is right."""
        if not self.best_secs:
            return math.inf
        left = max(self.best_secs - self.least_secs, 0.0)
        return self.calls * (BACKWARD * self.gained_per_sec + (1 - BACKWARD) * left / self.spent_secs)


def deal(
    session: Session, waiting: Sequence[tuple[EntryPlan, Task]], seconds: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[tuple[EntryPlan, Task, Outcome]]:
    """Yield each entry with the outcome of its search as that ends.

    Every entry has batches until a candidate is right, whatever that takes; then the next one goes to where it is worth most, until the
    seconds are over.
    """
    end = clock() + seconds
    searches = [_search(session, entry, task, lambda: clock() >= end) for entry, task in waiting]
    for each in searches:
        if session.is_over or session.is_interrupted:
            return
        yield from _stepped(each, clock)
    while running := [each for each in searches if each.running]:
        yield from _stepped(max(running, key=lambda each: each.worth), clock)


def _search(session: Session, entry: EntryPlan, task: Task, is_over: Callable[[], bool]) -> Search:
    """Return an entry's search, of which nothing has run."""
    search = Search(entry, task, max(1, sum(calls_of(entry.workload.tags).values())), least_secs(task))
    onward = reporter(session, entry)

    def on_progress(doing: str, done: int, total: int, best_secs: float | None) -> None:
        onward(doing, done, total, best_secs)
        if doing == "timed" and best_secs:
            search.best_secs = min(best_secs, search.best_secs or best_secs)

    def ended_by() -> Ending | None:
        if session.is_interrupted:
            return Ending.INTERRUPTED
        return Ending.SPENT if search.best_secs and is_over() else None

    search.task = replace(task, ended_by=ended_by)
    search.running = tuning(search.task, session.runner, session.workspace.store, on_progress)
    return search


def _stepped(search: Search, clock: Callable[[], float]) -> Iterator[tuple[EntryPlan, Task, Outcome]]:
    """Run a search's next batch; yield its outcome where there was none left."""
    begun, before = clock(), search.best_secs
    assert search.running is not None, "a search that has ended is not asked again"
    try:
        next(search.running)
    except StopIteration as end:
        search.running = None
        yield search.entry, search.task, end.value
        return
    took = clock() - begun
    search.spent_secs += took
    search.gained_per_sec = (before - search.best_secs) / took if before and took else 0.0
