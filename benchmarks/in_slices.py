"""Owns running a list of commands in slices of time: each slice goes on where the last one ended.

Knows nothing of what the commands measure.

    python benchmarks/in_slices.py benchmarks/h200.toml --state DIR --secs 560
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Command:
    """One command of a list."""

    name: str
    run: str
    """A line for bash, run in the repository; {state} is a folder of its own that stays."""
    secs: float
    """Seconds that it takes: it is not begun where less is left. It is ended at twice as many, or at the end of the slice."""
    resumes: bool = False
    """True for what goes on where it was ended: it is begun where any time is left, and again in the next slice until it ends by itself."""


def read(file: Path) -> list[Command]:
    """Return a list's commands; raise ValueError where the list makes no sense."""
    commands = [Command(**each) for each in tomllib.loads(file.read_text(encoding="utf-8"))["command"]]
    names = [each.name for each in commands]
    if twice := {name for name in names if names.count(name) > 1}:
        msg = f"{file}: {min(twice)} is there twice"
        raise ValueError(msg)
    return commands


def run_slice(commands: Iterable[Command], state: Path, secs: float, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Run what has not ended yet, in order, as far as the seconds go; return what has ended, with exit codes and seconds."""
    end, kept = clock() + secs, state / "ended.json"
    state.mkdir(parents=True, exist_ok=True)
    ended: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for command in commands:
        left = end - clock()
        if command.name in ended or left < (min(command.secs, 1.0) if command.resumes else command.secs):
            continue
        limit = left if command.resumes else min(left, 2 * command.secs)
        print(f"== {command.name}, {limit:.0f} s at most", flush=True)
        begun = clock()
        code = _run(command, state, limit)
        took = clock() - begun
        print(f"== {command.name}: {'ended by the limit' if code is None else f'exit code {code}'} after {took:.0f} s", flush=True)
        if code is not None or not command.resumes:
            ended[command.name] = {"code": code, "secs": round(took, 1)}
            new = kept.with_suffix(".new")
            new.write_text(json.dumps(ended, indent=1), encoding="utf-8")
            new.replace(kept)
    return ended


def _run(command: Command, state: Path, limit: float) -> int | None:
    """Run a command, with its output in NAME.txt; return its exit code, or None where the limit ended it."""
    folder = state / command.name
    folder.mkdir(exist_ok=True)
    line = command.run.replace("{state}", str(folder.resolve()))
    with (state / f"{command.name}.txt").open("a", encoding="utf-8") as output:
        output.write(f"$ {command.run}\n")
        output.flush()
        process = subprocess.Popen(["bash", "-c", line], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # What it started goes with it.
            for signal_ in (signal.SIGINT, signal.SIGKILL):
                if not _is_gone(process, signal_):
                    time.sleep(1.0)


def _is_gone(process: subprocess.Popen[bytes], signal_: signal.Signals) -> bool:
    """Send a signal to all of a command's processes; say whether there are none."""
    process.poll()
    try:
        os.killpg(process.pid, signal_)
    except ProcessLookupError:
        return True
    return False


def summary(commands: Iterable[Command], ended: Mapping[str, Any]) -> str:
    """Return a line for each command: exit code and seconds, or what it is expected to take."""
    lines = []
    for each in commands:
        end = ended.get(each.name)
        lines.append(f"{_result(end):<12} {(end or {'secs': each.secs})['secs']:>7.0f} s  {each.name}")
    return "\n".join(lines)


def _result(end: Mapping[str, Any] | None) -> str:
    if end is None:
        return "left"
    return {0: "done", None: "too slow"}.get(end["code"], f"exit code {end['code']}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a list of commands in slices of time.")
    parser.add_argument("list", type=Path, help="TOML with a table [[command]] for each: name, run, secs, resumes")
    parser.add_argument("--state", type=Path, required=True, help="folder of outputs, and of what has ended")
    parser.add_argument("--secs", type=float, required=True, help="seconds of this slice")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="these commands")
    given = parser.parse_args()
    commands = [each for each in read(given.list) if not given.only or each.name in given.only]
    ended = run_slice(commands, given.state, given.secs)
    print(summary(commands, ended))
    if any(each.name not in ended for each in commands):
        return 3
    return int(any(ended[each.name]["code"] != 0 for each in commands))


if __name__ == "__main__":
    sys.exit(main())
