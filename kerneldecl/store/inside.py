"""Owns reading files that others wrote: regular files only, of bounded size, and of a folder only what lies inside it.

Knows nothing of what the files mean. A name comes from a manifest or a bundle, which anybody may have written: it must not lead
out of its folder, by `..`, as an absolute path or through a symbolic link.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
from pathlib import Path
from typing import IO, Self

from kerneldecl.errors import printable

MOST_BYTES = 1 << 32
"""Size of a library, an object or any other file that is read; larger ones are refused."""
MOST_JSON_BYTES = 1 << 30
"""Size of a manifest or a bundle: some hundred thousand entries."""
_CHUNK_BYTES = 1 << 20
_LONGEST_NAME = 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnsafeFileError(Exception):
    """A file that is not read; the message is a phrase that follows its name."""


def is_digest(value: object) -> bool:
    """Say whether a value is a SHA-256 in hexadecimal: only those name blobs, records and libraries."""
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def is_inner_name(name: object) -> bool:
    """Say whether a value is a plain relative path: no empty part, no `.` or `..`, nothing absolute."""
    if not isinstance(name, str) or not name or len(name) > _LONGEST_NAME or "\0" in name or not name.isprintable():
        return False
    return not {"", ".", ".."} & set(name.split("/"))


def read_regular(path: Path | str, most_bytes: int = MOST_BYTES) -> bytes:
    """Return a regular file's bytes; raise UnsafeFileError for a link, a device, a pipe or too large a file, OSError otherwise."""
    descriptor, size = _opened(path, None, most_bytes)
    try:
        content = os.read(descriptor, size + 1)
        while len(content) != size and len(content) <= most_bytes and (more := os.read(descriptor, _CHUNK_BYTES)):
            content += more  # it was read in part, or grows
        return content
    finally:
        os.close(descriptor)


def opened_regular(path: Path | str, most_bytes: int = MOST_BYTES) -> IO[bytes]:
    """Return a regular file, opened for reading; raise as `read_regular`."""
    return os.fdopen(_opened(path, None, most_bytes)[0], "rb")


class Inside:
    """A folder of which regular files are read, each folder below it opened once. To be used in a `with` statement."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._open[""] = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    def read(self, name: str, most_bytes: int = MOST_BYTES) -> bytes:
        """Return a file's bytes; raise UnsafeFileError or OSError, as `read_regular`."""
        with self._file(name, most_bytes) as file:
            return file.read(most_bytes + 1)

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a file, read piece by piece; raise UnsafeFileError or OSError."""
        state = hashlib.sha256()
        with self._file(name, MOST_BYTES) as file:
            while chunk := file.read(_CHUNK_BYTES):
                state.update(chunk)
        return state.hexdigest()

    def defect(self, name: str, expected: str, said_by: str) -> str:
        """Return why a file is not the one whose SHA-256 is expected, as a phrase that names who says so; empty where it is."""
        try:
            found = self.digest(name)
        except UnsafeFileError as error:
            return f"{printable(name)} {error}"
        except OSError as error:
            return f"{printable(name)} cannot be read: {error.strerror}"
        return "" if found == expected else f"{printable(name)} has other content than {said_by} says"

    def _file(self, name: str, most_bytes: int) -> IO[bytes]:
        if not is_inner_name(name):
            raise UnsafeFileError("is no path inside its folder")
        above, _, last = name.rpartition("/")
        return os.fdopen(_opened(last, self._descriptor(above), most_bytes)[0], "rb")

    def _descriptor(self, folder: str) -> int:
        if folder not in self._open:
            above, _, last = folder.rpartition("/")
            try:
                self._open[folder] = os.open(last, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self._descriptor(above))
            except OSError as error:
                if error.errno in {errno.ELOOP, errno.ENOTDIR}:
                    raise UnsafeFileError("lies behind a symbolic link, or below what is no folder") from None
                raise
        return self._open[folder]


def _opened(path: Path | str, below: int | None, most_bytes: int) -> tuple[int, int]:
    """Return the descriptor and the size of a regular file; the path is relative to the folder `below`, if it is given."""
    status = os.lstat(path) if below is None else os.stat(path, dir_fd=below, follow_symlinks=False)
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeFileError("is no regular file")  # opening a device or a pipe may already do something, or wait for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=below)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size > most_bytes:
        os.close(descriptor)
        raise UnsafeFileError(f"has {status.st_size} bytes; at most {most_bytes} are read")
    return descriptor, status.st_size
