"""Owns the summary of many ratios: geometric mean, fifth percentile, worst, and the share of entries that are slower than the rival.

Knows nothing of what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

SLOWER = 0.97
"""A ratio below it counts as slower; above it, repeated measurements may find either faster."""

Row = Mapping[str, Any]


def fifth_percentile(ratios: Sequence[float]) -> float:
    """Return the ratio that one in twenty entries lies below or at: the nearest rank, ceil(0.05 n)."""
    return sorted(ratios)[math.ceil(0.05 * len(ratios)) - 1]


def summary(what: str, ratios: Sequence[float], entries: int) -> dict[str, Any]:
    """Return a row of the table; `entries` counts also those without a ratio."""
    counts = {"of": what, "entries": entries, "compared": len(ratios)}
    if not ratios:
        return counts
    return counts | {
        "geomean": geometric_mean(ratios),
        "5 %": fifth_percentile(ratios),
        "worst": min(ratios),
        f"under {SLOWER}": sum(ratio < SLOWER for ratio in ratios) / len(ratios),
    }


def by_rule(rows: Sequence[Row], ratio: Callable[[Row], float | None]) -> list[dict[str, Any]]:
    """Return the summary of all rows, then that of each rule, most frequent first."""
    rules = sorted({row["rule"] for row in rows}, key=lambda rule: (-sum(row["rule"] == rule for row in rows), rule))
    chosen = [("all", list(rows)), *((rule, [row for row in rows if row["rule"] == rule]) for rule in rules)]
    return [summary(what, _known(map(ratio, some)), len(some)) for what, some in chosen]


def _known(ratios: Iterable[float | None]) -> list[float]:
    return [ratio for ratio in ratios if ratio is not None]
