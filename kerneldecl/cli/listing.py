"""Owns the list of entries that `show` and `query` print, and what a complete build leaves of it, valid as long as its stamp holds.

Knows nothing of plans. Losing the file costs time alone: without it, entries are planned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kerneldecl.cli.table import table
from kerneldecl.diagnostics.units import duration, share_of_peak
from kerneldecl.null_build import stamp
from kerneldecl.store.checked import read_checked, write_checked
from kerneldecl.store.regular import read_file

FILE = "entries.json"
SCHEMA = 1
Json = dict[str, Any]


class Row(NamedTuple):
    """An entry as far as patterns ask for it."""

    name: str
    target: str
    rule: str
    tags: tuple[str, ...]
    policy: Any
    told: Json
    """What is listed of it."""

    @property
    def entry(self) -> str:
        return f"{self.name}@{self.target}"


def write_listing(root: Path, rows: Sequence[Row], archs: Mapping[str, str]) -> None:
    """Keep the rows beside the stamp of the build that was just completed; `archs` are those of the targets."""
    if stamp.is_fresh(str(root)) is not None:
        write_checked(root / "cache" / FILE, SCHEMA, {"stamp": _stamp_digest(root), "archs": dict(archs), "rows": rows})


def read_listing(root: Path) -> tuple[list[Row], Mapping[str, str]] | None:
    """Return the rows and the targets' archs; None where anything has changed since the build, or there is no such file."""
    if stamp.is_fresh(str(root)) is None:
        return None
    fields = read_checked(root / "cache" / FILE, SCHEMA)
    if fields is None or fields["stamp"] != _stamp_digest(root):
        return None
    return [_row(row) for row in fields["rows"]], fields["archs"]


def _row(fields: Sequence[Any]) -> Row:
    row = Row(*fields)
    policy = row.policy if isinstance(row.policy, str) else tuple(item if isinstance(item, str) else tuple(item) for item in row.policy)
    return row._replace(tags=tuple(row.tags), policy=policy)


def _stamp_digest(root: Path) -> str:
    return stamp.digest(read_file(root / stamp.STAMP))


def query_text(json: Json, width: int = 0) -> str:
    """Return a table of entries with time, share of the roofline and winner, whose template alone stands in a window of `width` columns."""
    rows = []
    for entry in json["entries"]:
        note = "  (expected, not measured)" if entry["unmeasured"] else f"  ({entry['measured']} measured)" * bool(entry["measured"])
        share = share_of_peak(entry["roofline_share"])
        if entry["winner"]:
            winner = entry["winner"].partition("(")[0] if width else entry["winner"]
            found = (duration(entry["run_secs"]), share, f"{winner}{note}")
        else:
            found = ("-", "", f"failed: {entry['failed']}" if entry["failed"] else "not tuned")
        rows.append((entry["entry"], *found))
    if not rows:
        return "no entry is in that state"
    return "\n".join(table(("entry", "time", "of roofline", "winner"), rows, width))


def listed(root: Path, patterns: Sequence[str]) -> Json | None:
    """Return the list as the last complete build has left it, of the entries that patterns select; None where it does not hold.

    Raise PatternError for patterns that match nothing.
    """
    found = read_listing(root)
    if found is None:
        return None
    rows, archs = tuple(found[0]), found[1]
    if patterns:
        from kerneldecl.declare.select import Facts, select

        unmeasured = {row.entry for row in rows if row.told["unmeasured"]}
        rows = select(rows, patterns, Facts(archs, lambda state: unmeasured if state == "unmeasured" else ()))
    return {"schema": 1, "entries": [row.told for row in rows]}
