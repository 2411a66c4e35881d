"""Owns what a store must do: the Protocol that the planner, the stages and the workers rely on.

Knows nothing of where records and blobs are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from kerneldecl.store.local import Miss, Record
from kerneldecl.store.record_text import Result


class Wanted(NamedTuple):
    """A record by its kind and key, and whether it is kept apart from those that can be shared."""

    kind: str
    key: str
    is_local: bool


class Store(Protocol):
    """Keeps records by key, and has blobs by the digest of their content. `store.local.LocalStore`, the workspace's own, takes blobs."""

    def read(self, kind: str, record_key: str, *, is_local: bool) -> Record | Miss:
        """Return the record, or why it is a miss: a read never fails.

        `is_local` records hold for one kind of machine alone, and are kept apart from those that can be shared.
        """
        ...

    def all(self, kind: str, *, is_local: bool) -> Iterator[Record]:
        """Yield the sound records of a kind, in the order of their keys."""
        ...

    def write(self, kind: str, manifest: str, result: Result, *, is_local: bool) -> str:
        """Keep a result under the key of its manifest and return the key. A sound record that is there already stays."""
        ...

    def forget(self, kind: str, record_key: str, *, is_local: bool) -> None:
        """Remove a record, if it is there."""
        ...

    def blobs_there(self) -> Callable[[str], bool]:
        """Return a function that says whether a blob is there, without reading it; it may answer as of when it was first asked."""
        ...

    def read_blob(self, blob_digest: str) -> bytes | Miss:
        """Return the bytes, whose digest was compared, or why they are a miss."""
        ...


class BlobStore(Store, Protocol):
    """A store that takes blobs, too."""

    def write_blob(self, content: bytes) -> str:
        """Keep bytes and return their SHA-256."""
        ...
