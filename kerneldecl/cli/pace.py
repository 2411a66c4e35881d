"""Owns how long tuning takes on this machine: what a build notes of it, and what `plan` expects by that.

Knows nothing of how entries are tuned. Losing the file loses the estimate alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kerneldecl.cli.steps import Steps
from kerneldecl.diagnostics.units import counted, duration
from kerneldecl.planning.action import Action
from kerneldecl.store.checked import read_checked, write_checked
from kerneldecl.tuning.events import Begun, Event, Finished, Report, Step

FILE = "pace.json"
SCHEMA = 1
Json = dict[str, Any]


class Pace(NamedTuple):
    """What the last build that tuned entries of a target has taken for them."""

    secs: float
    entries: int
    candidates: int


class Clock:
    """Notes how long the entries of each target take, from the first one's beginning to the last one's end. Events come from threads."""

    def __init__(self, onward: Report) -> None:
        self._onward = onward
        self._noting = threading.Lock()
        self._began: dict[str, float] = {}
        self._ended: dict[str, float] = {}
        self._candidates: dict[str, dict[str, int]] = {}

    def __call__(self, event: Event) -> None:
        with self._noting:
            self._note(event)
        self._onward(event)

    def _note(self, event: Event) -> None:
        if not isinstance(event, Begun | Step | Finished):
            return
        now, target = time.monotonic(), event.entry.rpartition("@")[2]
        if isinstance(event, Begun):
            self._began.setdefault(target, now)
        elif isinstance(event, Step) and event.doing == "timed":
            found = self._candidates.setdefault(target, {})
            found[event.entry] = found.get(event.entry, 0) + event.total
        elif isinstance(event, Finished) and event.kind == "tune":
            self._ended[target] = now

    @property
    def paces(self) -> dict[str, Pace]:
        """The pace of each target of which candidates were measured."""
        found: dict[str, Pace] = {}
        for target, entries in self._candidates.items():
            if candidates := sum(entries.values()):
                secs = self._ended.get(target, 0.0) - self._began.get(target, 0.0)
                found |= {target: Pace(secs, len(entries), candidates)} if secs > 0 else {}
        return found


def write_paces(cache: Path, paces: Mapping[str, Pace]) -> None:
    """Keep the paces, and those of other targets."""
    if paces:
        write_checked(cache / FILE, SCHEMA, {**read_paces(cache), **paces})


def read_paces(cache: Path) -> dict[str, Pace]:
    """Return the paces by target; none where there is no file or it is damaged."""
    return {target: Pace(*figures) for target, figures in (read_checked(cache / FILE, SCHEMA) or {}).items()}


def expected(actions: Sequence[Action], steps: Mapping[str, Steps], paces: Mapping[str, Pace]) -> list[Json]:
    """Return for each target how many candidates its entries have at most, where they are measured, and how long that takes.

    An entry whose candidates are not known yet counts as the average one of the last build that tuned any.
    """
    found: dict[str, Json] = {}
    for action in (action for action in actions if action.kind == "tune" and not action.is_hit):
        step, pace = steps.get(action.entry), paces.get(action.target)
        row = found.setdefault(action.target, {"target": action.target, "entries": 0, "candidates": 0, "secs": 0.0, "missing_device": ""})
        candidates = step.forecast.candidates if step else round(pace.candidates / pace.entries) if pace else 0
        row["entries"] += bool(candidates) or step is None
        row["candidates"] += candidates
        row["missing_device"] = step.missing_device if step and step.missing_device else row["missing_device"]
        row["secs"] = None if pace is None or row["secs"] is None else row["secs"] + candidates * pace.secs / pace.candidates
    return [row for row in found.values() if row["entries"]]


def expected_text(found: Sequence[Json]) -> list[str]:
    """Return a line for each target."""
    lines = []
    for row in found:
        what = f"{counted(row['candidates'], 'candidate')} at most" if row["candidates"] else counted(row["entries"], "entry", "entries")
        if row["missing_device"]:
            lines.append(f"{row['target']}: {what}, to be measured on {row['missing_device']}, which is not here")
        elif row["secs"] is not None:
            lines.append(f"{row['target']}: {what}, about {_rounded(row['secs'])} on this machine, as fast as it tuned last")
    return lines


def _rounded(secs: float) -> str:
    return f"{secs / 60:.0f} minutes" if secs >= 90 else duration(secs) if secs < 1 else f"{secs:.0f} s"
