"""Owns what is done with a batch of candidates where their device is: all that measuring needs, without a word from outside.

Knows nothing of where that is, or of who asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.model import Trial
from kerneldecl.store.protocol import Store
from kerneldecl.tuning.measure import Preparation, final, measured_on, timed, verify
from kerneldecl.tuning.task import Doing, Runner, Task


@dataclass(frozen=True)
class Measured:
    """A batch after it was measured."""

    trials: tuple[Trial, ...]
    device: dict[str, Any]
    """What a record says of the device."""


def measured(doing: Doing, task: Task, trials: Sequence[Trial], runner: Runner, store: Store) -> Measured:
    """Measure a batch with a runner that has the device; the libraries are in the task's folder, nothing of the store is read."""
    preparation = Preparation(task, runner, store)
    if doing == "timed":
        found = timed(task, trials, preparation, runner, _silent)
    elif doing == "final":
        found = final(task, trials, preparation, runner, _silent)
    else:
        found = [verify(task, trial, preparation, runner) for trial in trials]
    return Measured(tuple(found), measured_on(task, runner))


def _silent(doing: str, done: int, total: int, best_secs: float | None) -> None:
    del doing, done, total, best_secs
