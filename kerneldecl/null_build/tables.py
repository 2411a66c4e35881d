"""Owns the reading of workloads.toml's tables of workloads: those whose text is known are told by their digest, and are not parsed.

Knows nothing of what tables mean. Parsing ten thousand tables takes longer than planning the one of them that was edited.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, NamedTuple

import tomli

Table = Mapping[str, Any]
_TABLE = re.compile(r"^[ \t]*\[\[[ \t]*workload[ \t]*\]\]", re.MULTILINE)
_MORE = re.compile(r"\n[ \t]*\[")
"""What a header within the text of a table would begin with."""


class Tables(NamedTuple):
    """What stands in a file."""

    document: Table
    """All outside the tables of workloads, and those of these whose text is not known."""
    listed: Sequence[tuple[str, Table | None]]
    """The digest of each table of a workload, in the order of the file, and the table itself where its text is not known."""


def table_digest(table: Table) -> str:
    """Return a digest of a table's keys and values in their order, which names of expanded entries depend on."""
    return sha256(repr(table).encode()).hexdigest()


def parse(text: str) -> dict[str, Any] | None:
    """Return the TOML document, None where there is a mistake in it."""
    try:
        return tomli.loads(text)
    except (ValueError, RecursionError):  # not TOML, numbers or nests beyond Python's limits
        return None


def known_texts(text: str, tables: Sequence[Table]) -> dict[str, str]:
    """Return the digest of each table of a valid file by the digest of its text, of those whose text says all of it, and nothing else."""
    _, parts = _cut(text)
    if len(parts) != len(tables):
        return {}
    alone = ((part, table) for part, table in zip(parts, tables, strict=True) if not _MORE.search(part) or _is_alone(part, table))
    return {_text_digest(part): table_digest(table) for part, table in alone}


def read_tables(text: str, known: Mapping[str, str]) -> Tables | None:
    """Return the tables of a file, given `known_texts`; None where there is a mistake in it, or none may be left out."""
    head, parts = _cut(text)
    digests = [known.get(_text_digest(part)) for part in parts]
    document = parse("".join([head, *(part for part, digest in zip(parts, digests, strict=True) if digest is None)]))
    tables = document.get("workload", []) if document is not None else None
    if document is None or not isinstance(tables, list):
        return None
    # Else the head has tables of its own, which is a mistake, or a header was not seen as one.
    if parts and (len(tables) != digests.count(None) or (None not in digests and "workload" in document)):
        return None
    new = iter(tables)
    found = ((digest, None) if digest else _digested(next(new)) for digest in digests)
    return Tables(document, list(found) if parts else list(map(_digested, tables)))


def _digested(table: Table) -> tuple[str, Table | None]:
    return table_digest(table), table


def _cut(text: str) -> tuple[str, list[str]]:
    """Return what stands before the first `[[workload]]`, and the text from each of these headers to the next.

    Where strings may go over several lines, a line of one may look like a header: then all is one text.
    """
    starts: list[int | None] = [] if '"""' in text or "'''" in text else [found.start() for found in _TABLE.finditer(text)]
    return text[: starts[0] if starts else None], [text[start:end] for start, end in itertools.pairwise([*starts, None])]


def _is_alone(part: str, table: Table) -> bool:
    document = parse(part)
    return document is not None and repr(document) == repr({"workload": [table]})


def _text_digest(part: str) -> str:
    return sha256(part.encode(errors="surrogatepass")).hexdigest()
