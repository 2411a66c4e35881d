"""Owns the command that plans again whenever a source of the workspace is saved, and builds when it is asked to.

Knows nothing of plans or builds: both are commands of their own, which see the sources as they are then.
"""

from __future__ import annotations

import contextlib
import select
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import click

from kerneldecl.cli.options import Settings, patterns_argument
from kerneldecl.errors import ExitCode, ToolchainError
from kerneldecl.plugins.find import SINGULAR
from kerneldecl.store.regular import read_file

DECLARED = "workloads.toml"
_WRITTEN = ("cache", "dist")
"""Folders that builds write."""
_POLL_SECS = 0.2


@click.command()
@patterns_argument
@click.option("--build", "is_building", is_flag=True, help="Build after each save, instead of on Enter.")
@click.pass_obj
def watch(settings: Settings, patterns: tuple[str, ...], is_building: bool) -> int:
    """Plan again on every save. Enter builds; Ctrl-C ends."""
    try:
        from watchfiles import watch as changes_below
    except ImportError:
        raise ToolchainError("watching files needs watchfiles: pip install 'kerneldecl[watch]'") from None
    commands = [["plan", *patterns], *[["build", *patterns]] * is_building]
    _run(settings, commands)
    stop = threading.Event()
    asked = threading.Thread(target=_build_on_enter, args=(settings, ["build", *patterns], stop), daemon=True)
    if sys.stdin.isatty() and not is_building:
        _say("Enter builds, Ctrl-C ends")
        asked.start()
    with contextlib.suppress(KeyboardInterrupt):
        for changes in changes_below(settings.root):
            if saved := sources(settings.root, (Path(path) for _, path in changes), _declared(settings.root)):
                _say(f"saved: {', '.join(saved[:5])}{' …' * (len(saved) > 5)}")
                _run(settings, commands)
    stop.set()
    return ExitCode.DONE


def sources(root: Path, changed: Iterable[Path], declared: str) -> list[str]:
    """Return which of the changed files are sources of a build, as paths in the workspace, given the text of workloads.toml.

    These are workloads.toml and what it names, plug-ins, and Python that they may import.
    """
    inside = (path.relative_to(root) for path in changed if path.is_relative_to(root))
    return sorted({str(path) for path in inside if _is_source(path, declared)})


def _is_source(path: Path, declared: str) -> bool:
    if not path.parts or path.parts[0] in _WRITTEN:
        return False
    return path.name == DECLARED or path.parts[0] in SINGULAR or path.suffix == ".py" or path.as_posix() in declared


def _declared(root: Path) -> str:
    try:
        return read_file(root / DECLARED).decode(errors="replace")
    except OSError:  # an editor is about to put it there
        return ""


_running = threading.Lock()
"""Held while a command runs: a save during a build is planned after it."""


def _run(settings: Settings, commands: Iterable[list[str]]) -> None:
    """Run commands one after the other until one fails."""
    import subprocess  # not for every other command's start

    shared = ["-C", str(settings.root), *["-q"] * settings.quiet, *["-v"] * settings.verbosity, f"--color={settings.colour}"]
    with _running:
        for command in commands:
            if subprocess.run([sys.executable, "-m", "kerneldecl", *shared, *command], check=False).returncode:
                return


def _build_on_enter(settings: Settings, build: list[str], stop: threading.Event) -> None:
    while not stop.is_set():
        if select.select([sys.stdin], [], [], _POLL_SECS)[0]:
            if not sys.stdin.readline():
                return
            _run(settings, [build])


def _say(text: str) -> None:
    print(text, file=sys.stderr)
