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
LEFT_AS_TEXT: Mapping[str, tuple[str, str]] = {"lower": ("space", "{"), "tune": ("trials", "[{"), "rank": ("trials", "[{")}
"""By kind, the field of a result that only those parse who ask for it, and how it begins: the largest, and no plan needs it."""
_RESULT = '\n "result": {\n'
_END = f'\n }},\n "schema": {SCHEMA}\n}}\n'
_LINE_END = "\n"
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
    """Return the text of a record: JSON with a line for each line of the manifest and for each field of the result.

    The lines of the result are its `body`, so that nobody has to write it again to compare its digest.
    """
    fields = {"digest": digest(body(result).encode()), "kind": kind, "manifest": manifest.splitlines()}
    lines = ",\n".join(_encoded({name: result[name]})[1:-1] for name in sorted(result))
    head = json.dumps(fields, indent=1).removesuffix("\n}")
    return f"{head},{_RESULT}{lines}{_END}"


def quickly_read(text: str, kind: str) -> Text | None:
    """Return a record whose result has its digest; None where the text has another form or any defect."""
    head, found, rest = text.partition(_RESULT)
    if not found or not rest.endswith(_END):
        return None
    lines = rest[: -len(_END)]
    try:
        fields = json.loads(f"{head.removesuffix(',')}}}")
        if fields["digest"] != digest(f"{{{lines.replace(_LINE_END, '')}}}".encode()):
            return None
        manifest = "\n".join([*fields["manifest"], ""])
        return Text(fields["kind"], manifest, _result(lines, kind))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _result(lines: str, kind: str) -> Result:
    """Return the result of its lines; raise ValueError where they are not what `record_text` writes."""
    late, begin = LEFT_AS_TEXT.get(kind, ("", ""))
    name = f'\n"{late}":'
    start = lines.find(f"{name}{begin}") if late else -1
    end = lines.find("\n", start + 1)
    if start < 0 or end < 0:  # without it, or with nothing behind it
        return json.loads(f"{{{lines}}}")  # type: ignore[no-any-return]
    return Fields(json.loads(f"{{{lines[:start]}{lines[end:]}}}"), late, lines[start + len(name) : end].removesuffix(","))
