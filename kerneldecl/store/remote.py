"""Owns what a shared cache is: where, what it must do for the shared store to rely on it, and how it fails.

Knows nothing of what is kept there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

OBJECT_STORES = ("s3", "gs", "az", "abfs", "abfss")
"""Schemes of URLs of object stores: S3, Google Cloud Storage, Azure."""


@dataclass(frozen=True)
class SharedCache:
    """A cache that several machines share: where it is, what is done with it, whom to believe. No result depends on it."""

    url: str
    """Of a server or an object store, or the path of a folder."""
    mode: str = "read"
    """`read`, `read-write`, or `required`: both, and a build ends where the cache cannot be used."""
    trusted: tuple[str, ...] = ()
    """Public keys of those whose entries count; empty: everybody's do."""


class RemoteError(Exception):
    """The cache did not do what it was asked; the message is a phrase that follows its name."""


class RefusedError(RemoteError):
    """The cache refuses, and asking again is of no use."""


class Remote(Protocol):
    """One connection to a cache; one thread uses it at a time. Names are `ac/<key>` and `cas/<digest>`."""

    moved_bytes: int
    """What was received and sent so far."""

    def get(self, name: str, most_bytes: int) -> bytes | None:
        """Return what is kept under a name, None where there is nothing; raise RemoteError, also for more bytes than these."""
        ...

    def has(self, name: str) -> bool:
        """Say whether anything is kept under a name; raise RemoteError."""
        ...

    def put(self, name: str, content: bytes, *, replaces: bool = False) -> bool:
        """Keep content under a name, unless there is something: return False then; raise RemoteError.

        What is to be replaced is replaced, which a cache may refuse. A server that has no conditional writes replaces it always.
        """
        ...

    def abort(self) -> None:
        """End what another thread waits for, as far as that can be done."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...
