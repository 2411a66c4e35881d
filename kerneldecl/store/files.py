"""Owns writing files whole: readers see the old content or the new one, also where several write at once; and .gitignore.

Knows nothing of what results mean. A part of a file is locked while it is written, and the kernel releases the lock when its process
ends, however it ends: the next build removes what has none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Collection
from pathlib import Path

_PART = ".part"
_IGNORED = """\
# kerneldecl: artifacts, and of the store all but the records of declared archs
/dist/
*.part
/cache/*
!/cache/record/
"""


def write_whole(path: Path | str, content: bytes | str, *, durable: bool) -> None:
    """Replace a file, or make it and its folders. A `durable` one is on the disk before it takes its name."""
    descriptor, part = _new_part(path)
    has_name = False
    with os.fdopen(descriptor, "wb") as file:  # locked until it has its name
        try:
            file.write(content if isinstance(content, bytes) else content.encode())
            file.flush()
            if durable:
                os.fsync(descriptor)
            os.fchmod(descriptor, 0o644)
            os.replace(part, path)  # noqa: PTH105  a build of a thousand entries writes ten thousand files
            has_name = True
        except OSError as error:
            error.filename = str(path)  # a full disk says of no file, and a name that is taken of the part
            raise
        finally:
            if not has_name:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)  # noqa: PTH108


def _new_part(path: Path | str) -> tuple[int, str]:
    folder = os.path.dirname(path)  # noqa: PTH120
    try:
        return _locked_file(folder, ".", _PART)
    except FileNotFoundError:  # seldom: of a thousand files that are written, one is the first of its folder
        Path(folder).mkdir(parents=True, exist_ok=True)
        return _locked_file(folder, ".", _PART)


def locked_file(folder: Path, prefix: str, suffix: str) -> tuple[int, Path]:
    """Make a file of a new name and lock it; return its descriptor, which holds the lock, and its path."""
    descriptor, name = _locked_file(str(folder), prefix, suffix)
    return descriptor, Path(name)


def _locked_file(folder: str, prefix: str, suffix: str) -> tuple[int, str]:
    while True:
        name = f"{folder or '.'}/{prefix}{os.urandom(8).hex()}{suffix}"
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # else somebody took it for abandoned before it was locked
                return descriptor, name
        os.close(descriptor)


def if_abandoned(path: Path, remove: Callable[[], object]) -> None:
    """Call `remove` if nobody holds the lock of a file, and hold it meanwhile."""
    with contextlib.suppress(OSError):
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove()
        finally:
            os.close(lock)


def remove_parts(folder: Path, below: Collection[str]) -> None:
    """Remove what killed processes have left of files that they wrote into a folder, or into those of its folders that are named."""
    for place, folders, names in os.walk(folder):
        if place == str(folder):
            folders[:] = [name for name in folders if name in below]
        for part in (Path(place) / name for name in names if name.startswith(".") and name.endswith(_PART)):
            if_abandoned(part, part.unlink)


def ignore_results(root: Path) -> list[Path]:
    """Make git ignore what a build writes and can write again; return the file if it was written or extended."""
    ignore = root / ".gitignore"
    before = ignore.read_text(encoding="utf-8") if ignore.exists() else ""
    if _IGNORED in before:
        return []
    write_whole(ignore.resolve(), f"{before}{_IGNORED}", durable=False)
    return [ignore]
