"""Owns the log of a build: every event as a line of JSON, in `cache/events.jsonl` and where `--events` says.

Knows nothing of what is made of it. docs/reference/cli.md has the schema.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from kerneldecl.tuning.events import Event, Report

FILE = "events.jsonl"
"""In the store's folder: the events of the last build that had anything to do."""
SCHEMA = 1
Line = Mapping[str, Any]


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


@contextlib.contextmanager
def logged(report: Report, cache: Path, events: Path | None) -> Iterator[Report]:
    """Provide a report that passes events on and keeps them; `events` gets them, too, for whoever follows a build."""
    cache.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        paths = [cache / FILE, *([events] if events else [])]
        log = EventLog([held.enter_context(path.open("w", encoding="utf-8")) for path in paths])
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
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(line)
            if isinstance(parsed, dict) and "event" in parsed and isinstance(parsed.get("at"), int | float):
                found.append(parsed)
    return found
