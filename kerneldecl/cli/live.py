"""Owns the live display of a build on a terminal: a bar over all entries, and what happens to the current one below it.

Knows nothing of how the build works. Everything goes to standard error.
"""

from __future__ import annotations

import sys
from typing import Self

from rich.console import Console, Group
from rich.live import Live as Screen
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from kerneldecl.cli.progress import COUNTED, VERBS, step_text
from kerneldecl.errors import printable_lines
from kerneldecl.tuning.events import Event, Finished, Note, Started, Step

_SHARES = {"built": (0.0, 0.5), "verified": (0.5, 0.25), "racing": (0.75, 0.0), "timed": (1.0, 0.0)}
"""Where in an entry's time a step begins, and how much of it all its candidates take: compiling is about half of it."""


class Live:
    """A bar over all entries, and the current one in a line of its own, which a narrow window cuts off."""

    def __init__(self, *, colour: bool) -> None:
        self._console = Console(file=sys.stderr, no_color=not colour, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("left"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
        self._task = self._progress.add_task("tuning", total=None, visible=False)
        self._at = _line("")
        self._screen = Screen(self, console=self._console, transient=True, refresh_per_second=10)
        self._done = 0

    def __rich__(self) -> Group:
        return Group(self._progress, self._at) if self._at else Group(self._progress)

    def __enter__(self) -> Self:
        self._screen.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._screen.stop()

    def __call__(self, event: Event) -> None:
        if isinstance(event, Started):
            self._progress.update(self._task, total=event.tune, visible=event.tune > 0)
        elif isinstance(event, Step):
            begin, share = _SHARES[event.doing]
            part = begin + share * event.done / max(event.total, 1)
            self._progress.update(self._task, completed=self._done + part)
            self._at = _line(f"  {step_text(event)}")
        elif isinstance(event, Finished):
            self._finished(event)
        elif isinstance(event, Note):
            self._console.print(Text(printable_lines(event.text)))

    def _finished(self, event: Finished) -> None:
        self._done += event.kind in COUNTED
        verb, style = ("FAILED", "red") if event.has_failed else (VERBS[event.kind], "green")
        line = _line("") if not event.has_failed else Text()
        line.append(verb, style=style)
        line.append(printable_lines(f" {event.entry}: {event.text}"))
        self._console.print(line)
        self._progress.update(self._task, completed=self._done)
        self._at = _line("")


def _line(text: str) -> Text:
    """Return a text that takes one line: `show` has what a narrow window cuts off."""
    return Text(printable_lines(text), no_wrap=True, overflow="ellipsis")
