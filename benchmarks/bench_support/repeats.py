"""Owns the comparison of two tunings of one entry: same winner, a declared tie, or another one and by how much it differs.

Knows nothing of how entries are tuned.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from bench_support.gpu.kernels import label_of

from kerneldecl.model import Trial
from kerneldecl.tuning.race import tied

Row = dict[str, Any]
SAME, TIED, OTHER = "same", "tied", "other"
NEAR = 0.05
"""Candidates within this of the fastest, whose ratios are compared."""
MANY = 10
"""Samples from which on a median is compared."""


def verdict(first: Sequence[Trial], second: Sequence[Trial]) -> Row:
    """Compare two tunings by their trials, winner first, as records have them.

    Candidates whose code is equal are one. A tie is declared where a race has found no difference between its winner and the other
    race's. `apart` is how much slower the one winner was than the other, in the race that saw the smaller difference.
    """
    ours, theirs = first[0], second[0]
    row = {"first": label_of(ours.candidate), "second": label_of(theirs.candidate), "secs": [ours.run_secs, theirs.run_secs]}
    if ours.candidate == theirs.candidate or _code(ours) == _code(theirs):
        return {**row, "verdict": SAME, "apart": 0.0}
    if _has(tied(first), theirs) or _has(tied(second), ours):
        return {**row, "verdict": TIED, "apart": 0.0}
    seen = [slower for slower in (_slower(first, theirs), _slower(second, ours)) if slower is not None]
    return {**row, "verdict": OTHER, "apart": min(seen, default=None)}


def _code(trial: Trial) -> object:
    return trial.code_digest or trial.candidate


def _has(trials: Sequence[Trial], wanted: Trial) -> bool:
    return any(trial.candidate == wanted.candidate or _code(trial) == _code(wanted) for trial in trials)


def _slower(trials: Sequence[Trial], other: Trial) -> float | None:
    """Return by which share a race found a candidate slower than its winner; None where it has not timed it."""
    found = [trial for trial in trials if trial.samples and (trial.candidate == other.candidate or _code(trial) == _code(other))]
    return max(0.0, found[0].run_secs / trials[0].run_secs - 1) if found else None


def changes(first: Sequence[Trial], second: Sequence[Trial]) -> list[float]:
    """Return by which share the ratio of two candidates' times changed between tunings, for each pair of those near the fastest."""
    ours, theirs = ({_code(trial): trial.run_secs for trial in trials if len(trial.samples) >= MANY} for trials in (first, second))
    both = sorted((ours[code], theirs[code]) for code in ours.keys() & theirs.keys())
    near = [each for each in both if each[0] <= (1 + NEAR) * both[0][0]]
    return [abs(math.log(one[0] / other[0] * other[1] / one[1])) for one, other in itertools.combinations(near, 2)]


def quantiles(values: Sequence[float]) -> Row:
    """Return how many values there are, and those that half, three quarters and so on of them do not exceed."""
    ordered = sorted(values)
    return {
        "pairs": len(ordered),
        **{f"{share:.0%}": ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.75, 0.9, 0.95) if ordered},
    }


def summary(rows: Sequence[Row]) -> Row:
    """Return counts of the verdicts, the share of those that are the same or tied, and how far others are apart."""
    counts = {what: sum(row["verdict"] == what for row in rows) for what in (SAME, TIED, OTHER)}
    apart = sorted(row["apart"] for row in rows if row["verdict"] == OTHER and row["apart"] is not None)
    share = (counts[SAME] + counts[TIED]) / len(rows) if rows else 0.0
    return {"entries": len(rows), **counts, "same or tied": share, "most apart": apart[-1] if apart else 0.0}
