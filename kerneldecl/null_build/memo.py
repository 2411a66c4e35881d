"""Owns the memo, a plan's short cut: what the last complete build knew of each table of workloads.toml.

Knows nothing of why its entries were up to date. An unchanged table, under the same rules, policies, archs and records,
is still up to date; only new or changed tables are declared, and only their new entries are planned. Where the memo does
not fit in any way, the full plan is made, which also reports every mistake.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from kerneldecl.model import Workload
from kerneldecl.null_build import stamp
from kerneldecl.store.files import write_whole

MEMO = "cache/memo.json"
SCHEMA = 3


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


def table_digest(table: Mapping[str, Any]) -> str:
    """Return a digest of a table's keys and values in their order, which names of expanded entries depend on."""
    return sha256(repr(table).encode()).hexdigest()


def entry_digest(workload: Workload) -> str:
    """Return a digest of all that is declared of an entry, except its line."""
    return sha256(repr(dataclasses.replace(workload, line=0)).encode()).hexdigest()


def head_digest(document: Mapping[str, Any]) -> str:
    """Return a digest of all that stands outside the workloads."""
    return sha256(
        json.dumps({name: value for name, value in document.items() if name != "workload"}, sort_keys=True, default=str).encode()
    ).hexdigest()


def parse(content: bytes) -> dict[str, Any] | None:
    """Return the TOML document, None where there is a mistake in it."""
    try:
        return tomli.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # not UTF-8, not TOML, numbers or nests beyond Python's limits
        return None


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
    }
    write_whole(root / MEMO, json.dumps(fields, separators=(",", ":")), durable=False)


def read_memo(root: Path, document: Mapping[str, Any]) -> Memo | None:
    """Return the memo, None where it no longer holds; without keys of artifacts where one is not as it was left."""
    try:
        memo = json.loads((root / MEMO).read_bytes())
        holds = (
            memo["schema"] == SCHEMA
            and memo["head"] == head_digest(document)
            and memo["context"] == stamp.context(str(root), memo["extra"])
            and memo["records"] == stamp.records(str(root))
        )
        is_whole = holds and memo["artifacts"] == stamp.artifacts(str(root), memo["folders"])
        tables = {table: [Row._make(row) for row in rows] for table, rows in memo["tables"].items()} if holds else {}
        known = Memo(tables, memo["links"] if is_whole else {}, memo["plugins"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return known if holds else None
