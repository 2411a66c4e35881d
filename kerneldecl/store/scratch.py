"""Owns folders of the user's own outside the workspace: one for locks, one for what a build needs only while it runs.

Knows nothing of what is locked or built. Other users of the machine can neither see nor prepare what lies in them. A scratch folder
has a lock beside it, which the kernel releases when its process ends, however it ends: the next build removes what has none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kerneldecl.errors import ToolchainError
from kerneldecl.store.files import if_abandoned, locked_file

_LOCK = ".lock"


def runtime_folder() -> Path:
    """Return the user's folder for locks: in XDG_RUNTIME_DIR where that is the user's own, else in the temporary folder."""
    given = os.environ.get("XDG_RUNTIME_DIR", "")
    if Path(given).is_absolute() and _is_own(Path(given)):
        with contextlib.suppress(OSError):  # it may be full or read-only
            return _own_folder(Path(given) / "kerneldecl")
    return temporary_folder()


def temporary_folder() -> Path:
    """Return the user's folder in the temporary folder, or below the home where somebody else has taken its name there."""
    try:
        return _own_folder(Path(tempfile.gettempdir()) / f"kerneldecl-{os.getuid()}")
    except ToolchainError:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        home.mkdir(parents=True, exist_ok=True)
        return _own_folder(home / "kerneldecl")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Provide a folder of this process's own; remove it in the end, and those that killed processes have left before."""
    parent = temporary_folder()
    _sweep(parent)
    lock, folder = _locked(parent)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _locked(parent: Path) -> tuple[int, Path]:
    """Return the held lock of a new folder, and the folder. The lock is there first: a folder without one belongs to nobody."""
    lock, path = locked_file(parent, "scratch-", _LOCK)
    folder = _folder_of(path)
    folder.mkdir(mode=0o700)
    return lock, folder


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"scratch-*{_LOCK}"):
        if_abandoned(path, functools.partial(_remove, _folder_of(path)))


def _folder_of(lock: Path) -> Path:
    return lock.with_name(lock.name.removesuffix(_LOCK))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(folder.name + _LOCK).unlink(missing_ok=True)


def _own_folder(folder: Path) -> Path:
    """Return a folder that only this user can enter; make it if it is not there."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    if not _is_own(folder):
        raise ToolchainError(f"{folder} is not a folder of this user alone; remove it, or set TMPDIR to a folder of yours")
    return folder


def _is_own(folder: Path) -> bool:
    """Say whether a path is a folder, no link, that belongs to this user and is closed to others."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
