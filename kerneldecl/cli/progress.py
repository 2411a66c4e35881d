"""Owns which display shows a build's progress, and the lines of those that are no terminals.

Knows nothing of how the build works. Everything goes to standard error; standard output is for results.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, TextIO

from kerneldecl.diagnostics.units import duration
from kerneldecl.errors import printable_lines
from kerneldecl.tuning.events import Event, Finished, Note, Printed, Started, Step

if TYPE_CHECKING:
    from kerneldecl.cli.live import Live

VERBS = {"lower": "lowered", "tune": "tuned", "rank": "ranked", "measure": "measured", "build": "built", "link": "linked"}

COUNTED = ("tune", "rank", "measure")
"""Kinds of actions that finish an entry, so that the count of entries goes up."""


def wants_colour(choice: str, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Decide on colour: the option first, then NO_COLOR, then FORCE_COLOR, then whether it is a terminal."""
    if choice != "auto":
        return choice == "always"
    if environment.get("NO_COLOR"):
        return False
    return bool(environment.get("FORCE_COLOR")) or stream.isatty()


class Lines:
    """A line for each finished action, for logs."""

    def __init__(self, *, verbosity: int) -> None:
        self._verbosity = verbosity
        self._total = 0
        self._done = 0
        self._last_secs = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._total = event.tune
        elif isinstance(event, Finished):
            self._finished(event)
        elif isinstance(event, Note):
            self._say(event.text)
        elif isinstance(event, Printed):
            if self._verbosity > 0:
                self._say("\n".join(f"  {event.request}: {line}" for line in event.text.splitlines()))
        elif isinstance(event, Step) and (self._verbosity > 0 or time.monotonic() - self._last_secs > 10):
            self._say(f"  {step_text(event)}")

    def _finished(self, event: Finished) -> None:
        self._done += event.kind in COUNTED and not event.has_failed
        count = f" [{self._done}/{self._total}]" if event.kind in COUNTED and self._total else ""
        verb = "FAILED" if event.has_failed else VERBS[event.kind]
        self._say(f"{verb}{count} {event.entry}: {event.text}")

    def _say(self, text: str) -> None:
        self._last_secs = time.monotonic()
        sys.stderr.write(f"{printable_lines(text)}\n")
        sys.stderr.flush()


def step_text(step: Step) -> str:
    """Return the progress of an entry: `qkv@host: verified 7 of 20, first runs from 812 us`."""
    told = "best" if step.doing == "timed" else "first runs from"  # what wins is what a race of many runs finds
    best = f", {told} {duration(step.best_secs)}" if step.best_secs else ""
    return f"{step.entry}: {step.doing} {step.done} of {step.total}{best}"


def display(*, quiet: bool, verbosity: int, colour: str) -> Lines | Live:
    """Return the display: failures alone if quiet, a live one on a terminal, lines otherwise."""
    if quiet:
        return Quiet(verbosity=0)
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb" and not verbosity:
        from kerneldecl.cli.live import Live  # with rich, which lines do without

        return Live(colour=wants_colour(colour, sys.stderr, os.environ))
    return Lines(verbosity=verbosity)


class Quiet(Lines):
    """Failures only."""

    def __call__(self, event: Event) -> None:
        if isinstance(event, Finished) and event.has_failed:
            super().__call__(event)
