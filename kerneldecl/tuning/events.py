"""Owns the events that a build reports while it runs.

Knows nothing of how they are shown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Started:
    """What the plan asks for."""

    entries: int
    lower: int
    tune: int
    build: int


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


@dataclass(frozen=True)
class Printed:
    """What a plug-in or a tool has printed while a worker answered a request, such as `lower matmul`."""

    request: str
    text: str


Event = Started | Step | Finished | Note | Printed
Report = Callable[[Event], None]
