"""Owns a worker that answers in the test's own process, and the real command on such workers: a real one imports TVM first.

Knows nothing of what is asked. Tests of what a process is for (limits, crashes, interrupts, what it imports) have real ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import kerneldecl.__main__
from kerneldecl.runners import worker

_WHERE = ("kerneldecl.runners.local.Worker", "kerneldecl.runners.process.Worker", "kerneldecl.extract.extract.Worker")
_TURN = threading.Lock()
"""Workers of one build are asked by several threads; what they have in common are the modules of this process."""


class InThisProcess:
    """Stands in for `kerneldecl.runners.process.Worker`."""

    pid = os.getpid()

    def __init__(self, _: object, *_modules: str, **_limits: object) -> None:
        pass

    def start(self) -> None:
        pass

    def call(self, request: Mapping[str, Any], _: float) -> dict[str, Any]:
        with _TURN:
            answer: dict[str, Any] = json.loads(json.dumps(worker._answered(json.loads(json.dumps(request)))))
        answer.pop("is_last", None)
        return answer

    def stop(self) -> None:
        sys.modules.pop("nets", None)  # the module with a test's models: another test has another one


@contextlib.contextmanager
def workers_here() -> Iterator[None]:
    """Have builds of the Python interface, too, ask workers in this process."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings(action="ignore"):  # a worker's warnings are among what it prints
        for name in _WHERE:
            stack.enter_context(mock.patch(name, InThisProcess))
        yield


def run_command(root: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Run `kerneldecl` in a folder, and its workers, in this process; return exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with _as_if_started(root, arguments, environment), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = kerneldecl.__main__.main()
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def _as_if_started(root: Path, arguments: tuple[str, ...], environment: Mapping[str, str]) -> Iterator[None]:
    """Have this process look like one that was started in a folder, and put back what a command changes for the rest of its life."""
    interrupt = signal.getsignal(signal.SIGINT)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(root))
        stack.enter_context(mock.patch.dict(os.environ, environment, clear=True))
        stack.enter_context(mock.patch("sys.argv", ["kerneldecl", *arguments]))
        stack.enter_context(mock.patch("sys.path", [*sys.path]))
        stack.enter_context(mock.patch("sys.dont_write_bytecode", True))
        stack.enter_context(workers_here())
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, interrupt)
