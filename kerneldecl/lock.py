"""Owns waiting for what only one process at a time may use, and saying who has it.

Knows nothing of what is done meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from kerneldecl.errors import LockHeldError


@contextlib.contextmanager
def exclusive(path: Path, purpose: str, say: Callable[[str], None], *, wait: bool = True) -> Iterator[None]:
    """Hold the lock; if another process has it, say who and wait, or raise LockHeldError if told not to."""
    from filelock import FileLock, Timeout  # a plan needs none

    path.parent.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(path), path.with_suffix(".holder")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        sentence = f"{_read(holder)} is {purpose}"
        if not wait:
            raise LockHeldError(f"{sentence}; run again without --no-wait to wait for it") from None
        say(f"{sentence}: waiting for it to finish")
        lock.acquire()
    try:
        holder.write_text(f"process {os.getpid()} on {os.uname().nodename}", encoding="utf-8")
        yield
    finally:
        lock.release()


def _read(holder: Path) -> str:
    try:
        return holder.read_text(encoding="utf-8") or "another process"
    except OSError:
        return "another process"
