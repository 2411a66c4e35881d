"""Owns the log of a build: every event as a line of JSON, in `cache/events.jsonl` and where `--events` says.

Knows nothing of what is made of it. docs/reference/cli.md has the schema.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from kerneldecl.store.regular import regular
from kerneldecl.tuning.events import Event, Report

FILE = "events.jsonl"
"""In the store's folder: the events of the last build that had anything to do."""
SCHEMA = 1
Line = Mapping[str, Any]
_NUMBER, _COUNT, _TEXT, _FLAG = frozenset({int, float}), frozenset({int}), frozenset({str}), frozenset({bool})
_FIELDS: Mapping[str, Mapping[str, frozenset[type]]] = {
    "started": {"tune": _COUNT},
    "begun": {"entry": _TEXT, "computation": _TEXT},
    "step": {"entry": _TEXT, "doing": _TEXT, "done": _COUNT, "total": _COUNT},
    "ran": {"request": _TEXT, "process": _TEXT, "began": _NUMBER, "secs": _NUMBER, "computation": _TEXT, "failure": _TEXT},
    "finished": {"entry": _TEXT, "kind": _TEXT, "text": _TEXT, "has_failed": _FLAG},
    "ended": {"failure": _TEXT},
}
"""What is read of each event."""
_TIMES = ("at", "began", "secs", "best_secs")
_LATEST = 1e11
"""Seconds since the epoch, some thousand years from now: what is later is no time."""


class EventLog:
    """Writes events to files as they come. Events come from several threads."""

    def __init__(self, files: list[TextIO]) -> None:
        self._files = files
        self._writing = threading.Lock()

    def __call__(self, event: Event) -> None:
        self.write(type(event).__name__.lower(), {name: value for name, value in vars(event).items() if value is not None})

    def write(self, kind: str, fields: Line) -> None:
        line = json.dumps({"event": kind, "at": round(time.time(), 6), **fields})
        with self._writing:
            for file in self._files:
                file.write(f"{line}\n")
                file.flush()  # who follows the file sees an event when it comes, and a kill loses none


def _unread(path: str, flags: int) -> int:
    """Open a file for writing; raise OSError for a pipe that nobody reads, where a build would wait for a reader."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


@contextlib.contextmanager
def logged(report: Report, cache: Path, events: Path | None) -> Iterator[Report]:
    """Provide a report that passes events on and keeps them; `events` gets them, too, for whoever follows a build."""
    cache.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        files: list[TextIO] = [open(cache / FILE, "w", encoding="utf-8", opener=_unread)]  # noqa: SIM115  Path.open takes no opener
        held.enter_context(files[0])
        files += [held.enter_context(events.open("w", encoding="utf-8"))] if events else []
        log = EventLog(files)
        log.write("log", {"schema": SCHEMA})

        def both(event: Event) -> None:
            log(event)
            report(event)

        began = time.monotonic()
        try:
            yield both
        finally:
            error = sys.exception()
            failure = f"{type(error).__name__}: {error}" if error else ""
            log.write("ended", {"secs": round(time.monotonic() - began, 6), "failure": failure})


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a log as far as they are whole: a build may be at work, or was killed."""
    return Tail(path).read()


class Tail:
    """Reads a log that grows: each time what has come since, and all of it anew where another build writes there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._first = b""
        self._read = 0
        self._lines: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Return all lines that are whole and sound."""
        with open(self._path, "rb", opener=regular) as file:
            first = file.readline()  # it has the time at which the build began
            if first != self._first:
                self._first, self._read, self._lines = first, 0, []
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        self._lines += _parsed(whole.decode(errors="replace"))
        return self._lines


def _parsed(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(line)
            if isinstance(parsed, dict) and _is_event(parsed):
                yield parsed


def _is_event(line: Line) -> bool:
    """Say whether a line has the fields of its event, each of its type: what is read may be of another version, or nobody's."""
    if not isinstance(line.get("event"), str) or "at" not in line:
        return False
    fields = _FIELDS.get(line["event"], {})
    has_fields = all(type(line.get(name)) in types for name, types in fields.items())
    return has_fields and all(_is_time(line.get(name, 0)) for name in _TIMES)


def _is_time(value: object) -> bool:
    return type(value) in _NUMBER and 0 <= value < _LATEST  # type: ignore[operator]  # just checked
