"""Owns the command that shows a build while it runs elsewhere, from its events.

Knows nothing of builds but their events.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kerneldecl.cli.options import Settings, json_option, print_result
from kerneldecl.diagnostics.units import counted, duration
from kerneldecl.errors import ExitCode, ToolchainError, printable_lines

if TYPE_CHECKING:
    from kerneldecl.cli.event_log import Tail
    from kerneldecl.report.running import Running

_REFRESH_SECS = 0.5


@click.command()
@click.option("--once", is_flag=True, help="Say it once, and do not follow the build.")
@click.option("--events", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="The file of a build's --events.")
@json_option
@click.pass_obj
def top(settings: Settings, once: bool, events: Path | None, as_json: bool) -> int:
    """Show a build that is at work: entries in flight, what is done, how busy each process is."""
    import dataclasses

    from kerneldecl.cli.event_log import FILE, Tail

    path = events or settings.root / "cache" / FILE
    state = _state(tail := Tail(path), path)
    if once or as_json or not sys.stdout.isatty():
        print_result(as_json, {"schema": 1, **dataclasses.asdict(state), "left_secs": state.left_secs}, lambda _: running_text(state))
    else:
        _follow(tail, path)
    return ExitCode.DONE


def _state(tail: Tail, path: Path) -> Running:
    from kerneldecl.report.running import running

    if not path.is_file():
        raise ToolchainError(f"{path} is not there: no build has run here; `kerneldecl build` writes it")
    lines = tail.read()
    if not lines:
        raise ToolchainError(f"{path} holds no events; `kerneldecl build` writes it again")
    return running(lines, time.time())


def _follow(tail: Tail, path: Path) -> None:
    """Show the state until the build ends, or the user ends it."""
    from rich.live import Live
    from rich.text import Text

    with contextlib.suppress(KeyboardInterrupt), Live(Text(), refresh_per_second=1 / _REFRESH_SECS) as shown:
        while True:
            state = _state(tail, path)
            shown.update(Text(printable_lines(running_text(state)), no_wrap=True, overflow="ellipsis"))
            if state.ended is not None:
                return
            time.sleep(_REFRESH_SECS)


def running_text(state: Running) -> str:
    """Return a build's state: a line on the whole, a table of the entries in flight, one of the processes, and what was finished last."""
    from kerneldecl.cli.table import table, window
    from kerneldecl.report.running import WINDOW_SECS

    told = [f"{counted(state.entries, 'entry', 'entries')} to tune: {state.done} done"]
    told += [f"{state.failed} failed"] * bool(state.failed) + [f"{len(state.in_flight)} in flight"] * bool(state.in_flight)
    parts = [f"{', '.join(told)}; {_time(state)}"]
    if state.in_flight:
        rows = [
            [f"{each.secs:.1f}", f"{each.doing} {each.done} of {each.total}" if each.doing else "begun", _best(each.best_secs), each.entry]
            for each in state.in_flight
        ]
        parts.append("\n".join(table(("s", "doing", "best", "in flight"), rows, window(), is_named=False)))
    if state.processes:
        rows = [[each.name, f"{each.busy:.0%}", str(each.requests), str(each.failed), each.last] for each in state.processes]
        parts.append("\n".join(table(("process", f"busy of {WINDOW_SECS:.0f} s", "requests", "failed", "last"), rows, window())))
    return "\n\n".join([*parts, *(["\n".join(state.finished)] if state.finished else [])])


def _time(state: Running) -> str:
    if state.ended is not None:
        return f"ended after {duration(state.secs)}{f' by {state.ended}' * bool(state.ended)}"
    left = f", about {duration(state.left_secs)} left" if state.left_secs is not None else ""
    # Candidates that compile for long say nothing meanwhile; a build that was killed says nothing any more.
    quiet = f", no event for {duration(state.quiet_secs)}" if state.quiet_secs > 10 * _REFRESH_SECS else ""
    return f"{duration(state.secs)} so far{left}{quiet}"


def _best(secs: float | None) -> str:
    return duration(secs) if secs else ""
