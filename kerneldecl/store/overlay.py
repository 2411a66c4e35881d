"""Owns a store whose records go nowhere: what a command finds out while it only looks.

Knows nothing of what records mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kerneldecl.store.keys import key
from kerneldecl.store.local import Miss, Record
from kerneldecl.store.protocol import Store
from kerneldecl.store.record_text import Result


@dataclass(frozen=True)
class Overlay:
    """Reads what was written here, else what the store below has; nothing is written below."""

    below: Store
    records: dict[tuple[str, str, bool], Record] = field(default_factory=dict)
    """By kind, key, and whether they hold for this kind of machine alone."""

    def read(self, kind: str, record_key: str, *, is_local: bool) -> Record | Miss:
        return self.records.get((kind, record_key, is_local)) or self.below.read(kind, record_key, is_local=is_local)

    def all(self, kind: str, *, is_local: bool) -> Iterator[Record]:
        found = {record.key: record for record in self.below.all(kind, is_local=is_local)}
        found |= {at[1]: record for at, record in self.records.items() if (at[0], at[2]) == (kind, is_local)}
        return iter([found[record_key] for record_key in sorted(found)])

    def write(self, kind: str, manifest: str, result: Result, *, is_local: bool) -> str:
        record_key = key(manifest)
        self.records.setdefault((kind, record_key, is_local), Record(record_key, manifest, result))
        return record_key

    def forget(self, kind: str, record_key: str, *, is_local: bool) -> None:
        self.records.pop((kind, record_key, is_local), None)

    def blobs_there(self) -> Callable[[str], bool]:
        return self.below.blobs_there()

    def read_blob(self, blob_digest: str) -> bytes | Miss:
        return self.below.read_blob(blob_digest)
