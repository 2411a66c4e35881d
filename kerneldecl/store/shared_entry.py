"""Owns the form of what is shared: a record with its blobs, packed, and the entry that names it.

Knows nothing of connections. What is read here anybody may have written: sizes are bounded before anything is unpacked, and each digest
is compared.

A pack is the record's text and its blobs, each behind a line with its size, compressed with zstd. An entry is an ActionResult of Bazel's
remote execution API as JSON, which servers that check entries accept: its one output is the pack, in the entry itself if it is small, else
among the blobs; its output text is the signature of key and digest of the pack.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import zstandard

from kerneldecl.store.inside import is_digest
from kerneldecl.store.keys import digest
from kerneldecl.store.record_text import Result

KINDS = frozenset({"lower", "propose", "tune", "measure", "build", "cubin"})
"""Kinds of records that are shared: those that hold wherever their key does."""
MOST_ENTRY_BYTES = 1 << 20
MOST_PACK_BYTES = 1 << 28
_INLINE_BYTES = 1 << 16
"""Packs up to this size stand in their entries, so that one request gets both."""
_LEVEL = 3
_BLOBS: Mapping[str, tuple[str, ...]] = {"tune": ("object", "database", "source"), "cubin": ("cubin",)}


class EntryError(Exception):
    """An entry or a pack is not what it must be; the message is a phrase that follows its name."""


class Entry(NamedTuple):
    """What an entry says of its pack."""

    digest: str
    size: int
    pack: bytes | None
    """The pack itself, where it is small."""
    signature: str


def blobs_of(kind: str, result: Result) -> list[str]:
    """Return the digests of the blobs that belong to a record."""
    return [str(result.get(name)) for name in _BLOBS.get(kind, ())]


def packed(record: bytes, blobs: Sequence[bytes]) -> bytes:
    """Return a record's text and its blobs as they are shared."""
    parts = b"".join(b"%d\n%b" % (len(part), part) for part in (record, *blobs))
    return zstandard.ZstdCompressor(level=_LEVEL).compress(parts)


def unpacked(pack: bytes) -> tuple[bytes, list[bytes]]:
    """Return a record's text and its blobs; raise EntryError."""
    try:
        size = zstandard.frame_content_size(pack)
        if not 0 <= size <= MOST_PACK_BYTES:
            raise EntryError(f"unpacks to more than {MOST_PACK_BYTES} bytes, or does not say to how many")
        content = zstandard.ZstdDecompressor(max_window_size=MOST_PACK_BYTES).decompress(pack, max_output_size=size)
    except (zstandard.ZstdError, MemoryError):
        raise EntryError("is not compressed as it must be") from None
    record, *blobs = _parts(content)
    return record, blobs


def _parts(content: bytes) -> Iterator[bytes]:
    at = 0
    while not at or at < len(content):
        end = content.find(b"\n", at, at + 12)
        size = content[at:end]
        if end < 0 or not size.isdigit() or end + 1 + int(size) > len(content):
            raise EntryError("is cut off")
        at = end + 1 + int(size)
        yield content[end + 1 : at]


def signed_text(key: str, pack_digest: str) -> bytes:
    """Return what is signed of an entry: which pack belongs to which key."""
    return f"kerneldecl shared entry 1\n{key}\n{pack_digest}\n".encode()


def entry_text(kind: str, pack: bytes, signature: str) -> bytes:
    """Return the entry of a pack."""
    output: dict[str, Any] = {"path": kind, "digest": {"hash": digest(pack), "sizeBytes": str(len(pack))}}
    if is_inline(pack):
        output["contents"] = base64.b64encode(pack).decode()
    signed = {"stdoutRaw": base64.b64encode(signature.encode()).decode()} if signature else {}
    return json.dumps({"outputFiles": [output], **signed}, separators=(",", ":")).encode()


def is_inline(pack: bytes) -> bool:
    return len(pack) <= _INLINE_BYTES


def read_entry(content: bytes) -> Entry:
    """Return what an entry says; raise EntryError."""
    try:
        fields = json.loads(content)
        (output,) = fields["outputFiles"]
        found, size = output["digest"]["hash"], int(output["digest"]["sizeBytes"])
        inline = base64.b64decode(output["contents"], validate=True) if output.get("contents") else None
        signature = base64.b64decode(fields.get("stdoutRaw", ""), validate=True).decode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise EntryError("is no entry of kerneldecl") from None
    if not is_digest(found) or not 0 < size <= MOST_PACK_BYTES:
        raise EntryError("names no pack")
    return Entry(found, size, inline, signature)
