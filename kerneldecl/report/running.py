"""Owns what the events of a build that is at work say of its state: entries in flight, what is done, how busy each process is.

Knows nothing of files, or of who shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kerneldecl.report.spans import Line

WINDOW_SECS = 10.0
"""Of which processes are said to be busy."""
_COUNTED = frozenset({"tune", "rank", "measure"})
"""Kinds of actions that finish an entry."""


@dataclass(frozen=True)
class InFlight:
    """An entry that is being tuned."""

    entry: str
    secs: float
    doing: str
    """`built`, `verified`, `racing`, or empty before the first step."""
    done: int
    total: int
    best_secs: float | None


@dataclass(frozen=True)
class Process:
    name: str
    busy: float
    """Part of the last seconds in which it answered requests; the one it is at counts when it is answered."""
    requests: int
    failed: int
    last: str
    """The request that it has answered last."""


@dataclass(frozen=True)
class Running:
    """A build's state at one moment."""

    secs: float
    """Since it began."""
    quiet_secs: float
    """Since its last event."""
    entries: int
    """Entries to tune."""
    done: int
    failed: int
    in_flight: tuple[InFlight, ...]
    processes: tuple[Process, ...]
    finished: tuple[str, ...]
    """What came of the entries that were finished last, the newest first."""
    ended: str | None
    """None while it runs; else why it ended, empty for by itself."""

    @property
    def left_secs(self) -> float | None:
        """The time that is left, if the other entries take as long as those that are done; None while none is."""
        done = self.done + self.failed
        return self.secs / done * (self.entries - done) if done and self.ended is None else None


def running(lines: Sequence[Line], now: float) -> Running:
    """Return the state of the build that writes these events, at seconds since the epoch."""
    first, last = float(lines[0]["at"]), float(lines[-1]["at"])
    end = next((line for line in lines if line["event"] == "ended"), None)
    until = last if end else max(now, last)
    finished = [line for line in lines if line["event"] == "finished"]
    settled = [line for line in finished if line["kind"] in _COUNTED]
    return Running(
        secs=until - first,
        quiet_secs=max(0.0, now - last),
        entries=sum(line["tune"] for line in lines if line["event"] == "started"),
        done=sum(not line["has_failed"] for line in settled),
        failed=sum(bool(line["has_failed"]) for line in settled),
        in_flight=_in_flight(lines, until) if end is None else (),
        processes=_processes(lines, until),
        finished=tuple(f"{line['entry']}: {line['text']}" for line in reversed(finished[-5:])),
        ended=str(end["failure"]) if end else None,
    )


def _in_flight(lines: Sequence[Line], until: float) -> tuple[InFlight, ...]:
    began = {line["entry"]: float(line["at"]) for line in lines if line["event"] == "begun"}
    steps = {line["entry"]: line for line in lines if line["event"] == "step"}
    over = {line["entry"] for line in lines if line["event"] == "finished"}
    found = [(entry, at, steps.get(entry, {})) for entry, at in began.items() if entry not in over]
    return tuple(
        InFlight(entry, until - at, step.get("doing", ""), step.get("done", 0), step.get("total", 0), step.get("best_secs"))
        for entry, at, step in found
    )


def _processes(lines: Sequence[Line], until: float) -> tuple[Process, ...]:
    ran: dict[str, list[Line]] = {}
    for line in lines:
        if line["event"] == "ran":
            ran.setdefault(line["process"], []).append(line)
    window = min(WINDOW_SECS, max(until - float(lines[0]["at"]), 1e-3))
    return tuple(
        Process(
            name,
            _busy(several, until - window, until) / window,
            len(several),
            sum(bool(e["failure"]) for e in several),
            several[-1]["request"],
        )
        for name, several in sorted(ran.items())
    )


def _busy(several: Sequence[Line], since: float, until: float) -> float:
    pieces = ((float(line["began"]), float(line["began"]) + float(line["secs"])) for line in several)
    return sum(max(0.0, min(end, until) - max(begin, since)) for begin, end in pieces)
