"""Owns reading files that must be files: a pipe keeps its reader waiting, and a device may have no end.

Knows nothing of what they hold, and imports next to nothing: a null build reads its files so.
"""

from __future__ import annotations

import errno
import os
import stat


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a file, or of one that a link leads to; raise OSError for anything else."""
    with open(path, "rb", opener=regular) as file:
        return file.read()


def regular(path: str, flags: int) -> int:
    """Open a file for reading, as `open` wants its opener; raise OSError for what is none, without waiting."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    code, reason = (errno.EISDIR, os.strerror(errno.EISDIR)) if stat.S_ISDIR(mode) else (errno.ENXIO, "it is no file")
    raise OSError(code, reason, path)
