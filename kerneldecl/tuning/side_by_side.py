"""Owns the order in which entries are measured at the same time, on several devices: who takes which, and what becomes of a lost one's.

Knows nothing of how an entry is measured, or of what its result is.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kerneldecl.errors import LostGpuError
from kerneldecl.model import Arch
from kerneldecl.tuning.task import Runner

T = TypeVar("T")
Measure = Callable[[T, "T | None", Runner], None]
"""Measures an item, given the one that this runner measures next, as far as that is known."""
_WAKE_SECS = 0.1
"""Longest wait at a time: an interrupt just before a thread starts to wait does not wake it."""


def by_device(archs: Sequence[Arch]) -> list[list[int]]:
    """Return the places of those that are measured on GPUs of one model, for each model, and of those that a CPU measures."""
    found: dict[str | None, list[int]] = {}
    for place, arch in enumerate(archs):
        found.setdefault(arch.model if arch.gpu else None, []).append(place)
    return list(found.values())


@dataclass
class Line(Generic[T]):
    """Items that wait to be measured, in their order. Each runner knows its next one early, so that it can be prepared."""

    waiting: deque[T] = field(default_factory=deque)
    is_open: bool = False
    """Whether more may come: a runner waits for it where there is nothing else."""
    next_of: dict[int, T] = field(default_factory=dict)
    """The next item of each runner, by its place."""
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, items: Sequence[T]) -> None:
        """Have items wait behind the others."""
        with self._changed:
            self.waiting.extend(items)
            self._changed.notify(len(items))

    def close(self) -> None:
        """Say that no more comes."""
        with self._changed:
            self.is_open = False
            self._changed.notify_all()

    def drop(self) -> None:
        """Close, and have nobody take what waits."""
        with self._changed:
            self.waiting.clear()
            self.next_of.clear()
        self.close()

    def take(self, place: int) -> tuple[T, T | None] | None:
        """Return the item for a runner, and the one after it; where none waits, that of another which has not begun it. None at the end."""
        with self._changed:
            while self.is_open and not (self.waiting or self.next_of):
                self._changed.wait()
            if place not in self.next_of and not self.waiting and self.next_of:
                self.next_of[place] = self.next_of.pop(next(iter(self.next_of)))
            if place not in self.next_of and not self.waiting:
                return None
            taken = self.next_of.pop(place) if place in self.next_of else self.waiting.popleft()
            if self.waiting:
                self.next_of[place] = self.waiting.popleft()
            return taken, self.next_of.get(place)

    def give_back(self, place: int, item: T) -> None:
        """Have others measure an item, and what the runner would have measured after it, before all that waits."""
        with self._changed:
            after = [self.next_of.pop(place)] if place in self.next_of else []
            self.waiting.extendleft([*after, item])
            self._changed.notify_all()


def measure_side_by_side(items: Sequence[T], runners: Sequence[Runner], measure: Measure[T], say: Callable[[str], None]) -> None:
    """Measure items as `measure_line` does."""
    measure_line(Line(deque(items)), runners, measure, say)


def measure_line(line: Line[T], runners: Sequence[Runner], measure: Measure[T], say: Callable[[str], None]) -> None:
    """Measure what a line has until it is closed and empty, each item on the first runner that is free; with one runner, in this thread.

    A runner that has lost its GPU takes no more, and what it was measuring goes to the others. The first error of any other kind is
    raised when each has ended its item; an interrupt at once, and `measure` may then run on until its runner is stopped.
    """
    if len(runners) == 1:
        while taken := line.take(0):
            measure(*taken, runners[0])
        return
    left = dict(enumerate(runners))
    while left and (line.is_open or line.waiting):
        lost = _in_threads(line, left, measure)
        for place, error in lost.items():
            del left[place]
            if not left:
                raise error
            say(f"{error}; the others go on")


def _in_threads(line: Line[T], runners: Mapping[int, Runner], measure: Measure[T]) -> dict[int, LostGpuError]:
    """Have each runner measure until nothing waits; return what those say that have lost their GPU, by place."""
    is_over = threading.Event()

    def work(place: int, runner: Runner) -> LostGpuError | None:
        while not is_over.is_set() and (taken := line.take(place)):
            try:
                measure(*taken, runner)
            except LostGpuError as error:
                line.give_back(place, taken[0])
                return error
        return None

    pool = ThreadPoolExecutor(len(runners), "measure")
    try:
        futures = {place: pool.submit(work, place, runner) for place, runner in runners.items()}
        waiting = set(futures.values())
        while waiting:
            done, waiting = wait(waiting, _WAKE_SECS, FIRST_COMPLETED)
            if any(future.exception() for future in done):
                is_over.set()
                line.close()  # else the others wait for more
        results = {place: future.result() for place, future in futures.items()}
    finally:
        is_over.set()
        pool.shutdown(wait=False)  # an interrupt waits for nothing that a GPU is asked
    return {place: error for place, error in results.items() if error}
