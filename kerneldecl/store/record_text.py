"""Owns the text of records: written in one form, and read in that form without parsing what few readers ask for.

Knows nothing of files, nor of what records mean. A text of another form, or with any defect, is not read here but parsed as a whole
(`store.local`), which finds what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from kerneldecl.store.keys import digest

SCHEMA = 2
Result = Mapping[str, Any]
LEFT_AS_TEXT: Mapping[str, tuple[str, str]] = {"lower": ("space", "{"), "tune": ("trials", "[\n   {"), "rank": ("trials", "[\n   {")}
"""By kind, the field of a result that only those parse who ask for it, and how it begins: the largest, and no plan needs it."""
_RESULT = '\n "result": {'
_END = f'\n }},\n "schema": {SCHEMA}\n}}\n'
_INDENTS = tuple("\n" + " " * count for count in (8, 4, 4, 2, 1))
"""Replaced by a line end in this order, they take away up to nineteen spaces: six times what a record has."""
_encoded = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Text(NamedTuple):
    """What stands in a record."""

    kind: str
    manifest: str
    result: Result


class Fields(Mapping[str, Any]):
    """A result of which one field is text until somebody asks for it; asking raises ValueError where that is no JSON."""

    __slots__ = ("_text", "late", "parsed")

    def __init__(self, parsed: Result, late: str, text: str) -> None:
        self.parsed, self.late, self._text = parsed, late, text

    def __getitem__(self, name: str) -> Any:
        return json.loads(self._text) if name == self.late else self.parsed[name]

    def __iter__(self) -> Iterator[str]:
        yield from self.parsed
        yield self.late

    def __len__(self) -> int:
        return len(self.parsed) + 1


def body(result: Result) -> str:
    """Return the text of a result that its digest is of."""
    return _encoded(dict(result))


def record_text(kind: str, manifest: str, result: Result) -> str:
    """Return the text of a record, in the form that `quickly_read` reads."""
    fields = {
        "schema": SCHEMA,
        "kind": kind,
        "manifest": manifest.splitlines(),
        "digest": digest(body(result).encode()),
        "result": dict(result),
    }
    return json.dumps(fields, indent=1, sort_keys=True) + "\n"


def quickly_read(text: str, kind: str) -> Text | None:
    """Return a record whose result has its digest; None where the text has another form or any defect."""
    head, found, rest = text.partition(_RESULT)
    if not found or not rest.endswith(_END):
        return None
    written = rest[: -len(_END)]
    try:
        fields = json.loads(f"{head.rstrip(',')}}}")
        if fields["digest"] != digest(f"{{{_compact(written)}}}".encode()):
            return None
        lines = "\n".join([*fields["manifest"], ""])
        return Text(fields["kind"], lines, _result(written, kind))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _compact(written: str) -> str:
    """Return what is written without the white space between values: within them there are no line ends, and quotes are escaped."""
    for spaces in _INDENTS:
        written = written.replace(spaces, "\n")
    return written.replace("\n", "").replace('": ', '":')


def _result(written: str, kind: str) -> Result:
    """Return the result of its fields' text; raise ValueError where that is not in the form of `record_text`."""
    late, begin = LEFT_AS_TEXT.get(kind, ("", ""))
    start = written.find(f'\n  "{late}": {begin}') if late else -1
    end = written.find('\n  "', start + 1)
    if start < 0 or end < 0:  # without it, or with nothing behind it
        return json.loads(f"{{{written}}}")  # type: ignore[no-any-return]
    text = written[start + len(late) + 7 : end].rstrip(",")
    return Fields(json.loads(f"{{{written[:start]}{written[end:]}}}"), late, text)
