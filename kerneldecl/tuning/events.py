"""Owns the events that a build reports while it runs.

Knows nothing of how they are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kerneldecl.runners.events import Printed, Ran

__all__ = ["Begun", "Event", "Finished", "Note", "Printed", "Ran", "Report", "Started", "Step"]


@dataclass(frozen=True)
class Started:
    """What the plan asks for."""

    entries: int
    lower: int
    tune: int
    build: int


@dataclass(frozen=True)
class Begun:
    """An entry whose tuning begins; requests name the computation, which several entries may share."""

    entry: str
    computation: str


@dataclass(frozen=True)
class Step:
    """Progress of an entry: `built`, `verified`, `racing` or `timed`, so many candidates of so many, best seconds so far."""

    entry: str
    doing: str
    done: int
    total: int
    best_secs: float | None = None


@dataclass(frozen=True)
class Finished:
    """An action of an entry (or a link) is done or has failed."""

    entry: str
    kind: str
    text: str
    has_failed: bool = False


@dataclass(frozen=True)
class Note:
    """Something worth a line: waiting for a lock, say."""

    text: str


Event = Started | Begun | Step | Finished | Note | Printed | Ran
Report = Callable[[Event], None]
