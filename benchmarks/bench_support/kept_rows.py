"""Owns the rows of a benchmark that several runs make: a file to which each run adds, and in which the next finds what is done.

Knows nothing of what rows hold, but for the name of their entry.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FILE = "rows.jsonl"


class KeptRows:
    """The rows of a folder, by entry, in the order in which they came; without a folder, those of this run."""

    def __init__(self, folder: Path | None, asked: Mapping[str, Any]) -> None:
        """Read what is kept; raise ValueError where it was made for something else than `asked`, values of JSON."""
        self._path = folder and folder / FILE
        self.rows: dict[str, Row] = {}
        self.tunings: list[tuple[int, float]] = []
        """Entries and seconds of each run's tuning."""
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path and self._path.exists() else []
        if lines and (before := json.loads(lines[0])["asked"]) != asked:
            raise ValueError(f"{self._path} has rows of a run with {before}, this one has {dict(asked)}: take another folder")
        for line in lines[1:]:
            self._take(json.loads(line))
        if self._path and not lines:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"asked": asked})

    def add(self, row: Row) -> None:
        """Keep a row at once: the run may be killed in the next one."""
        self._take(row)
        self._append(row)

    def add_tuning(self, entries: int, secs: float) -> None:
        self.tunings.append((entries, secs))
        self._append({"tuned": entries, "secs": secs})

    def _take(self, row: Row) -> None:
        if "tuned" in row:
            self.tunings.append((row["tuned"], row["secs"]))
        else:
            self.rows[row["entry"]] = row

    def _append(self, content: Mapping[str, Any]) -> None:
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
