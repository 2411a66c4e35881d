"""Owns the workspace's store: records (a small text file for each key) and blobs (bytes named by their digest).

Knows nothing of what records mean, of plans or of TVM.

Contracts. A read never fails: whatever is wrong with a record or a blob makes it a miss with a reason. A write puts a
temporary file beside its place, flushes it to the disk and renames it, so that a reader sees all of it or nothing and a
kill at any moment loses at most what was not finished. Writers need no lock: two that write one key write the same
content, or, for tuning, whoever comes first wins (`write` does not replace).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kerneldecl.store.files import write_whole
from kerneldecl.store.keys import digest, key

SCHEMA = 2
Result = Mapping[str, Any]


@dataclass(frozen=True)
class Record:
    """What an action left behind: the manifest that makes its key, and the result as JSON values."""

    key: str
    manifest: str
    result: Result


@dataclass(frozen=True)
class Miss:
    """Why there is nothing usable under a key."""

    reason: str


NEVER = Miss("never done here")


@dataclass(frozen=True)
class LocalStore:
    """The folder `cache/` of a workspace."""

    root: Path

    def record_path(self, kind: str, record_key: str, *, is_local: bool) -> Path:
        return self.root / ("local" if is_local else "record") / kind / f"{record_key}.json"

    def read(self, kind: str, record_key: str, *, is_local: bool) -> Record | Miss:
        """Return the record, or why it is a miss."""
        path = self.record_path(kind, record_key, is_local=is_local)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return NEVER
        except OSError as error:
            return Miss(f"{_shown(path)} cannot be read: {error.strerror}")
        return _parsed(content, kind, record_key, _shown(path))

    def all(self, kind: str, *, is_local: bool) -> Iterator[Record]:
        """Yield the sound records of a kind, in the order of their keys."""
        for path in sorted(self.record_path(kind, "", is_local=is_local).parent.glob("*.json")):
            found = self.read(kind, path.stem, is_local=is_local)
            if isinstance(found, Record):
                yield found

    def write(self, kind: str, manifest: str, result: Result, *, is_local: bool) -> str:
        """Keep a result under its manifest's key and return the key. A sound record that is there already stays."""
        record_key = key(manifest)
        path = self.record_path(kind, record_key, is_local=is_local)
        if path.exists() and isinstance(self.read(kind, record_key, is_local=is_local), Record):
            return record_key
        body = _body(result)
        fields = {"schema": SCHEMA, "kind": kind, "manifest": manifest.splitlines(), "digest": digest(body.encode()), "result": result}
        write_whole(path, json.dumps(fields, indent=1, sort_keys=True) + "\n", durable=True)
        return record_key

    def forget(self, kind: str, record_key: str, *, is_local: bool) -> None:
        self.record_path(kind, record_key, is_local=is_local).unlink(missing_ok=True)

    def blob_path(self, blob_digest: str) -> Path:
        return self.root / "blob" / blob_digest[:2] / blob_digest

    def has_blob(self, blob_digest: str) -> bool:
        """Say whether a blob is there, by its name alone; `read_blob` checks the content."""
        return self.blob_path(blob_digest).exists()

    def read_blob(self, blob_digest: str) -> bytes | Miss:
        """Return the bytes, or why they are a miss. A blob with the wrong content is removed, so that it is made again."""
        path = self.blob_path(blob_digest)
        found = _blob(path)
        if isinstance(found, Miss) and path.is_file():
            path.unlink(missing_ok=True)
        return found

    def write_blob(self, content: bytes) -> str:
        """Keep bytes and return their digest."""
        blob_digest = digest(content)
        if isinstance(self.read_blob(blob_digest), Miss):
            write_whole(self.blob_path(blob_digest), content, durable=True)
        return blob_digest


def _shown(path: Path) -> str:
    return "/".join(path.parts[-4:])


def _body(result: Result) -> str:
    return json.dumps(result, sort_keys=True, separators=(",", ":"))


def _parsed(content: bytes, kind: str, record_key: str, shown: str) -> Record | Miss:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return Miss(f"{shown} is not JSON (cut off?)")
    if not isinstance(fields, dict) or not {"schema", "kind", "manifest", "digest", "result"} <= fields.keys():
        return Miss(f"{shown} lacks fields of a record")
    if fields["schema"] != SCHEMA or fields["kind"] != kind:
        return Miss(f"{shown} is a {fields['kind']} record of schema {fields['schema']}, not {kind} of {SCHEMA}")
    lines = fields["manifest"] if isinstance(fields["manifest"], list) else []
    manifest = "".join(f"{line}\n" for line in lines)
    if key(manifest) != record_key:
        return Miss(f"{shown} holds another manifest than its name says")
    if not isinstance(fields["result"], dict) or digest(_body(fields["result"]).encode()) != fields["digest"]:
        return Miss(f"{shown} was changed after it was written")
    return Record(record_key, manifest, fields["result"])


def _blob(path: Path) -> bytes | Miss:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return Miss("the blob is not in the store")
    except OSError as error:
        return Miss(f"{_shown(path)} cannot be read: {error.strerror}")
    return content if digest(content) == path.name else Miss(f"{_shown(path)} has other content than its name says")


def store_stats(store: LocalStore) -> dict[str, Any]:
    """Return counts and bytes of each kind of record and of blobs, and a line for each file that is not sound."""
    kinds: list[dict[str, Any]] = []
    damaged: list[str] = []
    for folder in sorted(path for side in ("record", "local") for path in (store.root / side).glob("*") if path.is_dir()):
        files = sorted(folder.glob("*.json"))
        kinds.append({"kind": "/".join(folder.parts[-2:]), "count": len(files), "bytes": sum(f.lstat().st_size for f in files)})
        found = (store.read(folder.name, file.stem, is_local=folder.parent.name == "local") for file in files)
        damaged += [miss.reason for miss in found if isinstance(miss, Miss)]
    blobs = sorted(path for path in (store.root / "blob").glob("*/*") if not path.name.startswith("."))
    kinds.append({"kind": "blob", "count": len(blobs), "bytes": sum(path.lstat().st_size for path in blobs)})
    damaged += [miss.reason for miss in (_blob(path) for path in blobs) if isinstance(miss, Miss)]
    return {"schema": 1, "kinds": kinds, "damaged": damaged}
