"""Owns a package as one file: a tar whose bytes follow from its files alone, and the reading of one that anybody may have written.

Knows nothing of what the files mean. A tar is read only if it is, byte for byte, the one that would be written of its files: names
ascend, each is a plain path inside, every member is a regular file with the same rights, owner and date. So links, devices, folders,
extended headers, duplicates and paths that lead out are refused by one comparison, before anything is written.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from kerneldecl.errors import ArtifactError, printable
from kerneldecl.store.inside import MOST_BYTES, UnsafeFileError, is_inner_name, opened_regular

BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * BLOCK)
_CHUNK_BYTES = 1 << 20
MOST_MEMBERS = 1 << 18
"""Files of a package; more would fill a file system with names alone."""
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"5": "a folder", b"6": "a pipe"}


class Member(NamedTuple):
    """A file of a tar, and where its content begins."""

    name: str
    size: int
    at: int


def files_below(folder: Path) -> list[str]:
    """Return the names of all files below a folder in the order of a tar; links and devices count as files."""
    found = (Path(place) / name for place, folders, names in os.walk(folder) for name in (*names, *_links(place, folders)))
    return sorted(str(path.relative_to(folder)) for path in found)


def _links(place: str, folders: list[str]) -> list[str]:
    return [name for name in folders if (Path(place) / name).is_symlink()]


def write_tar(folder: Path, path: Path) -> None:
    """Write the tar of a folder's files; raise ArtifactError for a file that no package holds."""
    with path.open("wb") as tar:
        for name in files_below(folder):
            try:
                with opened_regular(folder / name) as file:
                    size = os.fstat(file.fileno()).st_size
                    tar.write(_header(name, size))
                    while chunk := file.read(_CHUNK_BYTES):
                        tar.write(chunk)
            except (UnsafeFileError, ValueError) as error:
                raise ArtifactError(f"{printable(name)} cannot be packed: it {error}") from None
            tar.write(bytes(-size % BLOCK))
        tar.write(_END)


def unpack_tar(path: Path, folder: Path) -> None:
    """Write a tar's files into a folder that is empty; raise ArtifactError before anything is written where the tar is not sound."""
    try:
        with _opened(path) as tar:
            for member in list(_members(tar)):
                place = folder / member.name
                place.parent.mkdir(parents=True, exist_ok=True)
                tar.seek(member.at)
                with place.open("xb") as file:
                    _copy(tar, file, member.size)
    except UnsafeFileError as error:
        raise ArtifactError(f"{path} {error}") from None


def _opened(path: Path) -> IO[bytes]:
    try:
        return opened_regular(path)
    except OSError as error:
        raise UnsafeFileError(f"cannot be read: {error.strerror}") from None


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    while size:
        chunk = source.read(min(size, _CHUNK_BYTES))
        if not chunk:
            raise UnsafeFileError("ends within a file")
        target.write(chunk)
        size -= len(chunk)


def _members(tar: IO[bytes]) -> Iterator[Member]:
    """Yield the files of a tar once their headers are known to be sound; raise UnsafeFileError."""
    length = os.fstat(tar.fileno()).st_size
    names: dict[str, None] = {}
    before = ""
    while (block := tar.read(BLOCK)) != bytes(BLOCK):
        member = _member(block, tar.tell())
        end = member.at + member.size + (-member.size % BLOCK)
        if end + len(_END) > length:
            raise UnsafeFileError(f"ends within {printable(member.name)}")
        if member.name <= before:
            raise UnsafeFileError(f"holds {printable(member.name)} twice, or not in order")
        if not names.keys().isdisjoint(_above(member.name)):
            raise UnsafeFileError(f"holds {printable(member.name)}, which lies below a file")
        before = member.name
        names[before] = None
        if len(names) > MOST_MEMBERS:
            raise UnsafeFileError(f"holds more than {MOST_MEMBERS} files")
        tar.seek(member.at + member.size)
        if any(tar.read(end - member.at - member.size)):
            raise UnsafeFileError(f"holds something behind {printable(member.name)}")
        yield member
    if tar.read(2 * BLOCK) != bytes(BLOCK):
        raise UnsafeFileError("holds something behind its end, or has none")


def _above(name: str) -> Iterator[str]:
    while "/" in name:
        name = name.rpartition("/")[0]
        yield name


def _member(block: bytes, at: int) -> Member:
    """Return what a header says, if it is the header that would be written; raise UnsafeFileError."""
    if len(block) < BLOCK:
        raise UnsafeFileError("is cut off, or no tar")
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError):
        raise UnsafeFileError("is no tar, or damaged (compressed? packages are not)") from None
    if info.type in _KINDS:
        raise UnsafeFileError(f"holds {_KINDS[info.type]}, {printable(info.name)[:80]}")
    if not is_inner_name(info.name):
        raise UnsafeFileError(f"holds {printable(info.name)[:80]}, which is no path inside it")
    if not 0 <= info.size <= MOST_BYTES:
        raise UnsafeFileError(f"holds {printable(info.name)[:80]} of {info.size} bytes; at most {MOST_BYTES} are read")
    try:
        is_ours = _header(info.name, info.size) == block
    except ValueError:
        is_ours = False
    if not is_ours:
        raise UnsafeFileError(f"holds {printable(info.name)[:80]} with another header than kerneldecl writes")
    return Member(info.name, info.size, at)


def _header(name: str, size: int) -> bytes:
    """Return the header of a file: no owner, no date, readable by all; raise ValueError for a name that is too long."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict")
