"""Owns waiting for what only one process at a time may use, and saying who has it.

Knows nothing of what is done meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kerneldecl.errors import LockHeldError, ToolchainError
from kerneldecl.store.files import write_whole
from kerneldecl.store.inside import UnsafeFileError, read_regular

if TYPE_CHECKING:
    from filelock import FileLock

_POLL_SECS = 0.05
_NAMED_WITHIN_SECS = 1.0  # from taking a lock to its holder's name on the disk; a slow disk's time
_IN_USE = "in-use.lock"
_LONGEST_HOLDER = 1 << 10


@contextlib.contextmanager
def exclusive(path: Path, purpose: str, say: Callable[[str], None], *, wait: bool = True) -> Iterator[None]:
    """Hold the lock; if another process has it, say who and wait, or raise LockHeldError if `wait` is false."""
    with exclusive_of([path], purpose, say, wait=wait):
        yield


@contextlib.contextmanager
def exclusive_of(paths: Sequence[Path], purpose: str, say: Callable[[str], None], *, wait: bool = True) -> Iterator[Path]:
    """Hold the first of several locks that is free, and say which."""
    found = _acquired(paths)
    if found is None:
        sentence = f"{_holder(paths[0].with_suffix('.holder'))} is {purpose}"
        if not wait:
            raise LockHeldError(f"{sentence}; run again without --no-wait to wait for it")
        say(f"{sentence}: waiting for it to finish")
    while found is None:
        time.sleep(_POLL_SECS)
        found = _acquired(paths)
    path, lock = found
    try:
        # Written whole: a link with the holder's name is replaced, what it points at stays.
        write_whole(path.with_suffix(".holder"), f"process {os.getpid()} on {os.uname().nodename}", durable=False)
        yield path
    finally:
        # Nobody's name stays for one who waits for the next holder.
        path.with_suffix(".holder").unlink(missing_ok=True)
        lock.release()


@contextlib.contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Keep what a store holds from being collected; several builds can do so at a time. Wait while it is being collected."""
    with _flocked(folder, fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def unused(folder: Path) -> Iterator[None]:
    """Keep builds from beginning; raise LockHeldError if one is at work."""
    try:
        with _flocked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield
    except BlockingIOError:
        raise LockHeldError("a build is at work here, and may need what would be removed; run again when it is done") from None


@contextlib.contextmanager
def _flocked(folder: Path, how: int) -> Iterator[None]:
    """Hold a lock that the kernel releases when the process ends, however it ends."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / _IN_USE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(lock, how)
        yield
    finally:
        os.close(lock)


def _acquired(paths: Sequence[Path]) -> tuple[Path, FileLock] | None:
    from filelock import FileLock, Timeout  # a plan needs none

    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            raise ToolchainError(f"{path} is a symbolic link; remove it")
        # A GPU is locked in the thread that first measures, and given back in another.
        lock = FileLock(path, thread_local=False)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            continue
        except PermissionError:
            raise ToolchainError(f"{path} belongs to another user; ask for its removal") from None
        return path, lock
    return None


def _holder(name: Path) -> str:
    """Return who has a lock; one who has just taken it has yet to write its name."""
    named_until = time.monotonic() + _NAMED_WITHIN_SECS
    while time.monotonic() < named_until:
        try:
            return read_regular(name, _LONGEST_HOLDER).decode(errors="replace")
        except FileNotFoundError:
            time.sleep(_POLL_SECS)
        except (OSError, UnsafeFileError):
            break
    return "another process"
