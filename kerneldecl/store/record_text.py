"""Owns the text of records: written in one form, and read in that form without parsing what few readers ask for.

Knows nothing of files, nor of what records mean. A text of another form, or with any defect, is not read here but parsed as a whole
(`store.local`), which finds what is wrong with it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kerneldecl.store.keys import digest

SCHEMA = 2
Result = Mapping[str, Any]
LEFT_AS_TEXT: Mapping[str, Mapping[str, str]] = {
    "lower": {"signature": "{", "space": "{"},
    "tune": {"trials": "[{"},
    "rank": {"trials": "[{"},
}
"""By kind, the fields of a result that only those parse who ask for them, and how each begins: the largest, which a plan does not need."""
_OPENING = b'{\n "digest": "'
_HEAD, _DIGITS = len(_OPENING), 64
_MIDDLE = b'",\n "kind": "%b",\n "manifest": [\n  "'
_BETWEEN_LINES = b'",\n  "'
_RESULT = b'"\n ],\n "result": {\n'
_END = b'\n },\n "schema": %d\n}\n' % SCHEMA
_encoded = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_read_value = json.JSONDecoder().raw_decode


class Text(NamedTuple):
    """What stands in a record."""

    manifest: str
    result: Result


class Fields(Mapping[str, Any]):
    """A result of which some fields are text until somebody asks for them; asking raises ValueError where that is no JSON."""

    __slots__ = ("late", "parsed")

    def __init__(self, parsed: Result, late: Mapping[str, str]) -> None:
        self.parsed, self.late = parsed, late

    def __getitem__(self, name: str) -> Any:
        return json.loads(self.late[name]) if name in self.late else self.parsed[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.parsed
        yield from self.late

    def __len__(self) -> int:
        return len(self.parsed) + len(self.late)


def field_text(result: Result, name: str) -> str:
    """Return a field of a result as its record has it."""
    return result.late[name] if type(result) is Fields and name in result.late else _encoded(result[name])


def body(result: Result) -> str:
    """Return the text of a result that its digest is of."""
    return _encoded(dict(result))


def record_bytes(kind: str, manifest: str, result: Result) -> bytes:
    """Return the content of a record: JSON with a line for each line of the manifest and for each field of the result.

    The lines of the result are its `body`, so that nobody has to write it again to compare its digest.
    """
    listed = _BETWEEN_LINES.join(json.dumps(line)[1:-1].encode() for line in manifest.splitlines())
    lines = ",\n".join(_encoded({name: result[name]})[1:-1] for name in sorted(result)).encode()
    head = _OPENING + digest(body(result).encode()).encode() + _MIDDLE % kind.encode()
    return b"".join((head, listed, _RESULT, lines, _END))


def quickly_read(content: bytes, kind: str, record_key: str) -> Text | None:
    """Return a record whose manifest has its key and whose result has its digest; None where the bytes have another form or any defect."""
    start = _HEAD + _DIGITS
    middle, end = _middle(kind), content.find(_RESULT, start)
    if end < 0 or not (content.startswith(_OPENING) and content.startswith(middle, start) and content.endswith(_END)):
        return None
    # Backslashes stand before quotes; where one does not, this is no text that the key is a digest of.
    manifest = content[start + len(middle) : end].replace(b"\\", b"").replace(_BETWEEN_LINES, b"\n") + b"\n"
    lines = content[end + len(_RESULT) : -len(_END)]
    if digest(manifest) != record_key or digest(b"{%b}" % lines.replace(b"\n", b"")) != str(content[_HEAD:start], "latin-1"):
        return None
    try:
        return Text(manifest.decode(), _result(lines.decode(), kind))
    except (ValueError, TypeError, RecursionError):
        return None


@functools.cache
def _middle(kind: str) -> bytes:
    return _MIDDLE % kind.encode()


def _result(lines: str, kind: str) -> Result:
    """Return the result of its lines; raise ValueError where they are not what `record_bytes` writes."""
    late: dict[str, str] = {}
    for name, begin in LEFT_AS_TEXT.get(kind, {}).items():
        start = lines.find(f'\n"{name}":{begin}')
        end = lines.find("\n", start + 1)
        if start >= 0 and end >= 0:  # it is there, with something behind it
            late[name] = lines[start + len(name) + 4 : end].removesuffix(",")
            lines = lines[:start] + lines[end:]
    return Fields(_parsed(f"{{{lines}}}"), late) if late else _parsed(f"{{{lines}}}")


def _parsed(text: str) -> Result:
    """Return the object that a text is; raise ValueError where it is none."""
    value, end = _read_value(text)
    if end != len(text):
        raise ValueError("there is more than one value")
    return value  # type: ignore[no-any-return]
