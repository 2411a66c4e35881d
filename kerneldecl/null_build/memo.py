"""Owns a plan's short cut: what the last complete build knew of each table of workloads.toml.

Knows nothing of why its entries were up to date. A table that is as it was, under the same rules, policies, archs and
records, is up to date still; only new or changed tables are declared, and only their new entries are planned. What does not fit the
memo in any way leaves the matter to the full plan, which also words every mistake.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import tomli

from kerneldecl.model import Workload
from kerneldecl.null_build import stamp

MEMO = "cache/memo.json"
SCHEMA = 2
Row = tuple[str, str, str, str, str, str, str]
"""Name, target, keys of lower, tune and build, what stands for the entry in the link's manifest, and the entry's digest."""


class Memo(NamedTuple):
    """What the last complete build knew."""

    tables: Mapping[str, list[Row]]
    """Rows of each table, by the table's digest."""
    links: Mapping[str, str]
    """Key of each target's artifact."""
    plugins: Mapping[str, Mapping[str, str]]
    """Digests of the policies and templates behind each policy, by `plugins_key`."""


def table_digest(table: Mapping[str, Any]) -> str:
    """Return a digest of a table's keys and values in their order, which names of expanded entries depend on."""
    return sha256(repr(table).encode()).hexdigest()


def plugins_key(policy: str, kind: str) -> str:
    """Return the name under which the digests of a policy for a kind of arch are kept."""
    return f"{policy} {kind}"


def entry_digest(workload: Workload) -> str:
    """Return a digest of all that is declared of an entry, less where it stands."""
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
    except (UnicodeDecodeError, tomli.TOMLDecodeError):
        return None


def write_memo(root: Path, document: Mapping[str, Any], known: Memo, extra: list[str], folders: list[str]) -> None:
    """Keep what is known; `extra` are files that keys depend on beside plug-ins, `folders` the artifacts."""
    fields = {
        "schema": SCHEMA,
        "head": head_digest(document),
        "context": stamp.context(str(root), extra),
        "records": stamp.records(str(root)),
        "artifacts": stamp.artifacts(str(root), folders),
        "extra": extra,
        "folders": folders,
        **known._asdict(),
    }
    temporary = root / f"{MEMO}.part"
    temporary.write_text(json.dumps(fields, separators=(",", ":")), encoding="utf-8")
    temporary.replace(root / MEMO)


def read_memo(root: Path, document: Mapping[str, Any]) -> Memo | None:
    """Return the memo, None where it does not hold any more. Of an artifact that is not as it was left, it knows no key."""
    try:
        memo = json.loads((root / MEMO).read_bytes())
        holds = (
            memo["schema"] == SCHEMA
            and memo["head"] == head_digest(document)
            and memo["context"] == stamp.context(str(root), memo["extra"])
            and memo["records"] == stamp.records(str(root))
        )
        is_whole = holds and memo["artifacts"] == stamp.artifacts(str(root), memo["folders"])
        known = Memo(memo["tables"], memo["links"] if is_whole else {}, memo["plugins"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if holds else None
