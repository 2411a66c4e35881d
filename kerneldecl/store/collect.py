"""Owns the removal of what a store need not keep: records and blobs that were not used for long, or are too many.

Knows nothing of why anything must be kept: it is told. A file was used when it was last read or written, as far as its file system says.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from kerneldecl.store.inside import is_digest
from kerneldecl.store.local import MOST_RECORD_BYTES, LocalStore, Record, judged
from kerneldecl.store.results import BLOBS


@dataclass(frozen=True)
class Limits:
    """What a store may hold besides what must be kept."""

    most_bytes: int | None = None
    """Of all files, those that must be kept included."""
    oldest: float | None = None
    """Seconds since the epoch; what was not used since then goes."""


@dataclass(frozen=True)
class Kept:
    """What must stay."""

    keys: Collection[str]
    """Keys of records, which stay with their blobs, and with what made their computation and candidates known."""
    files: Collection[Path] = ()


@dataclass(frozen=True, order=True)
class _File:
    used: float
    place: str
    """Records before blobs of the same age, so that no record names a blob that went before it."""
    path: Path
    size: int


@dataclass(frozen=True)
class Collected:
    """What was removed, or would be."""

    removed: tuple[Path, ...]
    removed_bytes: int
    left_bytes: int
    kept_bytes: int
    """Of what is left, what must be kept."""


def collect(store: LocalStore, limits: Limits, kept: Kept, *, is_dry: bool) -> Collected:
    """Remove what is beyond the limits, least recently used first, and nothing that must be kept."""
    files = sorted(_files(store))
    needed = _needed(store, kept)
    left = sum(file.size for file in files)
    kept_bytes = sum(file.size for file in files if file.path in needed)
    removed: list[_File] = []
    for file in (file for file in files if file.path not in needed):
        is_old = limits.oldest is not None and file.used < limits.oldest
        is_much = limits.most_bytes is not None and left > limits.most_bytes
        if (is_old or is_much) and (is_dry or _remove(file)):
            removed.append(file)
            left -= file.size
    return Collected(tuple(file.path for file in removed), sum(file.size for file in removed), left, kept_bytes)


def total_bytes(store: LocalStore) -> int:
    """Return the size of all records and blobs."""
    return sum(file.size for file in _files(store))


def _remove(file: _File) -> bool:
    """Remove a file that nobody has used since it was looked at."""
    with contextlib.suppress(FileNotFoundError):
        if _used(file.path.lstat()) != file.used:
            return False
        file.path.unlink()
    return True


def _files(store: LocalStore) -> Iterator[_File]:
    """Yield the store's records and blobs by the names that it gives them; other files are somebody else's."""
    for place, folders in (("a", ("record", "local")), ("b", ("blob",))):
        for folder in folders:
            for path in (store.root / folder).glob("*/*"):
                if is_digest(path.name.removesuffix(".json") if place == "a" else path.name):
                    status = path.lstat()
                    yield _File(_used(status), place, path, status.st_size)


def _used(status: os.stat_result) -> float:
    return max(status.st_atime, status.st_mtime)


def _needed(store: LocalStore, kept: Kept) -> set[Path]:
    """Return the files of the records that must stay: themselves, their blobs, and the records of their computations and candidates."""
    computations: set[str] = set()
    needed = set(kept.files)
    for kind in ("tune", "rank"):
        for path, record in _records(store, kind):
            if record.key in kept.keys or path in kept.files:
                computations.add(str(record.result["computation"]))
                needed |= {path, *(store.blob_path(str(record.result[name])) for name in BLOBS)}
    for kind in ("lower", "propose", "link", "build", "measure", "cubin"):
        needed |= {store.record_path(kind, key, is_local=is_local) for key in kept.keys for is_local in (False, True)}
    lowered = (path for path, record in _records(store, "lower") if record.result["computation"] in computations)
    return needed.union(lowered, _proposals(store, computations))


def _proposals(store: LocalStore, computations: Collection[str]) -> Iterator[Path]:
    for path, record in _records(store, "propose"):
        if record.manifest.partition('\ncomputation = "')[2][:64] in computations:
            yield path


def _records(store: LocalStore, kind: str) -> Iterator[tuple[Path, Record]]:
    for is_local in (False, True):
        for path in sorted(store.record_path(kind, "", is_local=is_local).parent.glob("*.json")):
            record = judged(_read_unnoticed(path), kind, path.stem, "")
            if isinstance(record, Record):
                yield path, record


def _read_unnoticed(path: Path) -> bytes:
    """Return a file's content without counting as a use of it; empty where it cannot be read."""
    quietly = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(OSError):
        try:
            descriptor = os.open(path, quietly | os.O_NOATIME)
        except PermissionError:  # it is another user's
            descriptor = os.open(path, quietly)
        with os.fdopen(descriptor, "rb") as file:
            return file.read(MOST_RECORD_BYTES)
    return b""
