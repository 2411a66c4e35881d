"""Owns which calls travel to a worker together, and when: short ones several at a time, for the scheduler takes milliseconds for each.

Knows nothing of workers, of what is called, or of how it travels. The caller keeps its threads apart.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

PARCEL_SECS = 0.05
"""Calls go together that take as long as this."""
MOST_CALLS = 32
"""Most calls of a parcel: a worker that dies costs a retry of each."""
HOLD_SECS = 0.05
"""Longest that a short call waits for others."""
PROBES = 64
"""Calls of a kind that are under way, each alone, while nobody knows how long one takes."""
_WEIGHT = 0.2
"""Weight of the newest parcel in the mean of its kind."""


@dataclass(frozen=True)
class Call:
    """A function that is to run on a worker, with its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    need: str
    """What a worker must be good for: `compile`, or to measure for the arch that this names. A worker that refuses one refuses all."""
    kind: str = ""
    """Calls of one kind have one need and may travel together; one without a kind travels alone, and at once."""
    resources: Mapping[str, float] = field(default_factory=dict)
    priority: int = 0
    """The highest come first."""


class Waiting(NamedTuple):
    """A call that is to be sent."""

    call: Call
    tell: Callable[[Any], None]
    """Gets what becomes of it."""
    since_secs: float


Parcel = tuple[Waiting, ...]


class Parcels:
    """The calls that are to be sent."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Waiting]] = {}
        self._mean_secs: dict[str, float] = {}
        self._probing: Counter[str] = Counter()

    def add(self, item: Waiting) -> None:
        """Have a call wait."""
        self._waiting.setdefault(item.call.kind, []).append(item)

    def returned(self, parcel: Parcel, secs: float | None) -> None:
        """Note the end of a parcel, and how long the worker took for it, if it has."""
        kind = parcel[0].call.kind
        self._probing[kind] -= 1
        if secs is not None:
            each = secs / len(parcel)
            before = self._mean_secs.get(kind, each)
            self._mean_secs[kind] = before + _WEIGHT * (each - before)

    def take(self, now_secs: float) -> list[Parcel]:
        """Return what is to be sent now, by priority: it waits no more."""
        taken = [parcel for kind in list(self._waiting) for parcel in self._taken(kind, now_secs)]
        for parcel in taken:
            self._probing[parcel[0].call.kind] += 1
        return sorted(taken, key=lambda parcel: -parcel[0].call.priority)

    def due_secs(self, now_secs: float) -> float | None:
        """Return in how many seconds something is to be sent that waits now; None where nothing is unless something else happens."""
        held = [min(item.since_secs for item in items) for kind, items in self._waiting.items() if items and kind in self._mean_secs]
        return max(0.0, min(held) + HOLD_SECS - now_secs) if held else None

    def clear(self) -> list[Waiting]:
        """Return all that waits; it waits no more."""
        items = [item for several in self._waiting.values() for item in several]
        self._waiting.clear()
        return items

    def _taken(self, kind: str, now_secs: float) -> list[Parcel]:
        items = self._waiting.pop(kind)
        size, most = self._size(kind), len(items)
        if kind and kind not in self._mean_secs:
            most = max(0, PROBES - self._probing[kind])
        elif len(items) < size and now_secs - min(item.since_secs for item in items) < HOLD_SECS:
            most = 0
        items.sort(key=lambda item: -item.call.priority)
        if left := items[most:]:
            self._waiting[kind] = left
        return _shared_out(items[:most], size)

    def _size(self, kind: str) -> int:
        """Return how many calls of a kind go together."""
        secs = self._mean_secs.get(kind) if kind else None
        return 1 if secs is None else max(1, min(MOST_CALLS, int(PARCEL_SECS / max(secs, 1e-6))))


def _shared_out(items: Sequence[Waiting], size: int) -> list[Parcel]:
    """Return parcels of about the same number of calls, none of more than `size`."""
    count = math.ceil(len(items) / size)
    ends = [len(items) * place // count for place in range(count + 1)] if count else [0]
    return [tuple(items[start:end]) for start, end in itertools.pairwise(ends)]
