"""Owns the memo, a plan's short cut: what the last complete build knew of each table of workloads.toml.

Knows nothing of why its entries were up to date. An unchanged table, under the same rules, policies, archs and records,
is still up to date; only new or changed tables are declared, and only their new entries are planned. Where the memo does
not fit in any way, the full plan is made, which also reports every mistake.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kerneldecl.model import Workload
from kerneldecl.null_build import stamp
from kerneldecl.store.files import write_whole
from kerneldecl.store.regular import read_file

MEMO = "cache/memo.json"
SCHEMA = 4


class Row(NamedTuple):
    """An entry of the last complete build."""

    name: str
    target: str
    lower_key: str
    propose_key: str
    tune_key: str
    build_key: str
    link_digest: str
    """Digest of the entry in the link's manifest."""
    entry_digest: str


class Memo(NamedTuple):
    """Keys and digests of the last complete build."""

    tables: Mapping[str, Sequence[Row]]
    """Rows of each table, by the table's digest."""
    links: Mapping[str, str]
    """Key of each target's artifact."""
    plugins: Mapping[str, Mapping[str, str]]
    """Digests of the policies behind each policy, by `workspace.plugins_key`."""
    texts: Mapping[str, str] = MappingProxyType({})
    """The digest of each table by that of its text (`null_build/tables.py`)."""


def entry_digest(workload: Workload) -> str:
    """Return a digest of all that is declared of an entry, except its line."""
    return sha256(repr([value for name, value in vars(workload).items() if name != "line"]).encode()).hexdigest()


def head_digest(document: Mapping[str, Any]) -> str:
    """Return a digest of all that stands outside the workloads."""
    return sha256(
        json.dumps({name: value for name, value in document.items() if name != "workload"}, sort_keys=True, default=str).encode()
    ).hexdigest()


def write_memo(root: Path, document: Mapping[str, Any], known: Memo, context: str, extra: list[str], folders: list[str]) -> None:
    """Keep what is known; `context` is the stamp's, `extra` are files besides plug-ins that keys depend on, `folders` the artifacts'."""
    fields = {
        "schema": SCHEMA,
        "head": head_digest(document),
        "context": context,
        "records": stamp.records(str(root)),
        "artifacts": stamp.artifacts(str(root), folders),
        "extra": extra,
        "folders": folders,
        **known._asdict(),
        "texts": dict(known.texts),
    }
    write_whole(root / MEMO, json.dumps(fields, separators=(",", ":")), durable=False)


def load_memo(root: Path) -> dict[str, Any] | None:
    """Return the fields of the memo, of which `tables`, `links`, `plugins` and `texts` are trusted once `still_holding` has said so."""
    try:
        fields = json.loads(read_file(root / MEMO))
        return fields if fields["schema"] == SCHEMA and set(fields["texts"].values()) <= fields["tables"].keys() else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def still_holding(root: Path, memo: Mapping[str, Any], document: Mapping[str, Any]) -> Memo | None:
    """Return what a memo knows, None where it no longer holds; without keys of artifacts where one is not as it was left.

    Of the document, only what stands outside the workloads matters.
    """
    try:
        holds = (
            memo["head"] == head_digest(document)
            and memo["context"] == stamp.context(str(root), memo["extra"])
            and memo["records"] == stamp.records(str(root))
        )
        is_whole = holds and memo["artifacts"] == stamp.artifacts(str(root), memo["folders"])
        tables = {table: [Row._make(row) for row in rows] for table, rows in memo["tables"].items()} if holds else {}
        known = Memo(tables, memo["links"] if is_whole else {}, memo["plugins"], memo["texts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return known if holds else None
