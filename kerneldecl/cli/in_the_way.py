"""Owns the words for a path that is not what it has to be: a link that leads nowhere, a pipe, a file where a folder belongs.

Knows nothing of what the path is for.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

OF_WHAT_IS_THERE = frozenset({errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})
"""Errors of files that are about what stands at a path, or above it."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISREG, "a file"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def in_the_way(error: OSError) -> str:
    """Return what stands at an error's path, or above it, in the place of something else, and the way out; empty where nothing does."""
    if error.filename is None or error.errno not in {*OF_WHAT_IS_THERE, errno.ENOENT}:
        return ""
    path = Path(os.fsdecode(error.filename))
    *above, last = (*reversed(path.absolute().parents), path.absolute())
    wants_folder = error.errno in {errno.EEXIST, errno.ENOTDIR}  # of a folder that is made, or read
    return next(filter(None, (*(_wrong(place, wants_folder=True) for place in above), _wrong(last, wants_folder=wants_folder))), "")


def _wrong(place: Path, *, wants_folder: bool) -> str:
    try:
        mode, link = place.stat().st_mode, f", by a symbolic link to {place.readlink()}" if place.is_symlink() else ""
    except OSError as error:
        if not place.is_symlink():
            return ""
        reason = "where nothing is; make that, or remove the link" if error.errno == errno.ENOENT else "which leads nowhere; remove it"
        return f"{place} is a symbolic link to {place.readlink()}, {reason}"
    if stat.S_ISDIR(mode) == wants_folder and (wants_folder or stat.S_ISREG(mode)):
        return ""
    found = next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
    return f"{place} is {found}{link}; a {'folder' if wants_folder else 'file'} belongs there: move away what is there"
