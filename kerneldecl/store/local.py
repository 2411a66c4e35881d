"""Owns the workspace's store: records (a small text file for each key) and blobs (bytes named by their digest).

Knows nothing of what records mean, of plans or of TVM.

Contracts. A read never fails: whatever is wrong with a record or a blob makes it a miss with a reason. A write puts a
temporary file beside its place and renames it, so that a reader sees all of it or nothing and a kill at any moment loses at
most what was not finished. What was measured is flushed to the disk before; where power fails, what follows from it, or from
its key, may be cut off, which is a miss as any defect is, and is made again. Writers need no lock: two that write one key write the same
content, or, for tuning, whoever comes first wins (`write` does not replace).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kerneldecl.store.files import write_whole
from kerneldecl.store.inside import UnsafeFileError, is_digest, read_regular
from kerneldecl.store.keys import digest, key
from kerneldecl.store.record_text import SCHEMA, Result, body, quickly_read, record_bytes
from kerneldecl.store.result_types import wrong_field

MOST_RECORD_BYTES = 1 << 26
"""Size of a record that is read; the largest of this repository have some ten thousand bytes."""


_MEASURED = frozenset({"measure", "tune", "rows"})
"""Kinds of records that take a device to make again."""


class Record(NamedTuple):
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
        return Path(self.record_file(kind, record_key, is_local=is_local))

    def record_file(self, kind: str, record_key: str, *, is_local: bool) -> str:
        """Return the record's path as text: of thousands, making a `Path` takes longer than opening the file."""
        return f"{self.root}/{'local' if is_local else 'record'}/{kind}/{record_key}.json"

    def read(self, kind: str, record_key: str, *, is_local: bool) -> Record | Miss:
        """Return the record, or why it is a miss."""
        if not is_digest(record_key):
            return NEVER
        path = self.record_file(kind, record_key, is_local=is_local)
        try:
            content = read_regular(path, MOST_RECORD_BYTES)
        except FileNotFoundError:
            return NEVER
        except OSError as error:
            return Miss(f"{_shown(path)} cannot be read: {error.strerror}")
        except UnsafeFileError as error:
            return Miss(f"{_shown(path)} {error}")
        return _sound(content, kind, record_key) or _parsed(content, kind, record_key, _shown(path))

    def all(self, kind: str, *, is_local: bool) -> Iterator[Record]:
        """Yield the sound records of a kind, in the order of their keys."""
        for path in sorted(self.record_path(kind, "", is_local=is_local).parent.glob("*.json")):
            found = self.read(kind, path.stem, is_local=is_local)
            if isinstance(found, Record):
                yield found

    def write(self, kind: str, manifest: str, result: Result, *, is_local: bool) -> str:
        """Keep a result under its manifest's key and return the key. A sound record that is there already stays."""
        record_key = key(manifest)
        path = self.record_file(kind, record_key, is_local=is_local)
        if os.path.lexists(path) and isinstance(self.read(kind, record_key, is_local=is_local), Record):
            return record_key
        write_whole(path, record_bytes(kind, manifest, result), durable=kind in _MEASURED)
        return record_key

    def forget(self, kind: str, record_key: str, *, is_local: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.record_file(kind, record_key, is_local=is_local))  # noqa: PTH108  as `record_file` says

    def blob_path(self, blob_digest: str) -> Path:
        return Path(self.blob_file(blob_digest))

    def blob_file(self, blob_digest: str) -> str:
        """Return the blob's path as text, as `record_file`."""
        return f"{self.root}/blob/{blob_digest[:2]}/{blob_digest}"

    def blobs_there(self) -> Callable[[str], bool]:
        """Return a function that says whether a blob is there, by its name alone; `read_blob` checks the content.

        It lists a folder when a blob of it is first asked for: a plan asks for tens of thousands.
        """

        @functools.cache
        def names(folder: str) -> frozenset[str]:
            try:
                return frozenset(os.listdir(f"{self.root}/blob/{folder}"))  # noqa: PTH208  names alone
            except OSError:
                return frozenset()

        return lambda blob_digest: is_digest(blob_digest) and blob_digest in names(blob_digest[:2])

    def read_blob(self, blob_digest: str) -> bytes | Miss:
        """Return the bytes, or why they are a miss. A blob with the wrong content is removed, so that it is made again."""
        if not is_digest(blob_digest):
            return Miss("what names the blob is no digest")  # and would lead to any other file
        path = self.blob_path(blob_digest)
        found = _blob(path)
        if isinstance(found, Miss) and (path.is_file() or path.is_symlink()):
            path.unlink(missing_ok=True)
        return found

    def write_blob(self, content: bytes) -> str:
        """Keep bytes and return their digest."""
        blob_digest = digest(content)
        path = self.blob_file(blob_digest)
        if not os.path.lexists(path) or isinstance(self.read_blob(blob_digest), Miss):
            write_whole(path, content, durable=False)
        return blob_digest


def _shown(path: Path | str) -> str:
    return "/".join(Path(path).parts[-4:])


def judged(content: bytes, kind: str, record_key: str, shown: str) -> Record | Miss:
    """Return the record that a text holds, or what is wrong with it, as a sentence about what is `shown`."""
    return _sound(content, kind, record_key) or _parsed(content, kind, record_key, shown)


def _sound(content: bytes, kind: str, record_key: str) -> Record | None:
    """Return a record that is sound and in the form in which records are written; None for any other."""
    text = quickly_read(content, kind, record_key)
    if text is None or wrong_field(kind, text.result):
        return None
    return Record(record_key, text.manifest, text.result)


def _parsed(content: bytes, kind: str, record_key: str, shown: str) -> Record | Miss:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError):
        return Miss(f"{shown} is not JSON (cut off?)")
    if defect := next(_defects(fields, kind, record_key), ""):
        return Miss(f"{shown} {defect}")
    return Record(record_key, _manifest(fields), fields["result"])


def _defects(fields: Any, kind: str, record_key: str) -> Iterator[str]:
    """Yield what is wrong with a record's fields, as phrases; what follows a defect may rely on it."""
    if not isinstance(fields, dict) or not {"schema", "kind", "manifest", "digest", "result"} <= fields.keys():
        yield "lacks fields of a record"
    if fields["schema"] != SCHEMA or fields["kind"] != kind:
        yield f"is a {str(fields['kind'])[:20]} record of schema {str(fields['schema'])[:20]}, not {kind} of {SCHEMA}"
    if key(_manifest(fields)) != record_key:
        yield "holds another manifest than its name says"
    if not isinstance(fields["result"], dict) or digest(body(fields["result"]).encode()) != fields["digest"]:
        yield "was changed after it was written"
    if wrong := wrong_field(kind, fields["result"]):
        yield f"has no {wrong} that a {kind} record can have"


def _manifest(fields: Mapping[str, Any]) -> str:
    lines = fields["manifest"] if isinstance(fields["manifest"], list) else []
    return "".join(f"{line}\n" for line in lines).encode(errors="replace").decode()  # JSON may hold half of a surrogate pair


def _blob(path: Path) -> bytes | Miss:
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return Miss("the blob is not in the store")
    except OSError as error:
        return Miss(f"{_shown(path)} cannot be read: {error.strerror}")
    except UnsafeFileError as error:
        return Miss(f"{_shown(path)} {error}")
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
