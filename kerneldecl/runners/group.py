"""Owns the end of a worker with everything that it has started, in whatever session that is.

Knows nothing of requests.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

LEFT_SECS = 60.0
"""Seconds after which a killed process is left behind: a driver may keep one whose kernel does not end."""
_ROUNDS = 20
"""Most often that processes are looked for: one that is about to fork has a child that the last look has not seen."""


def end_all(leader: subprocess.Popen[bytes], mark: str) -> None:
    """Kill a process, its group, and all that inherited `mark`, a variable with a value of its own, from it; wait for it, not for ever."""
    if leader.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            leader.wait(LEFT_SECS)
    for _ in range(_ROUNDS):
        found = list(_marked(mark.encode()))
        if not found:
            return
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


def _marked(mark: bytes) -> Iterator[int]:
    """Yield the running processes that have a variable of exactly this name and value."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):  # it has ended, is another user's, or no process
            process = int(folder.name)
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield process
