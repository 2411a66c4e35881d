"""Owns what came of searching one entry by several policies: whose winner is fastest, and what each search has cost.

Knows nothing of how policies search, or of how the winners were timed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.limits import Budget

NOISE = 0.005
"""Winners that are this near to the fastest share its place."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a comparison of policies is asked."""

    policies: Mapping[str, Any]
    """Values of `policy` as workloads.toml has them, by how each is shown."""
    budget: Budget = ()
    """Of each search, beside what is declared."""
    warm: frozenset[str] = frozenset()
    """The policies that see what the workspace's records say of other computations."""


@dataclass(frozen=True)
class Searched:
    """One policy's search of one entry."""

    entry: str
    policy: str
    run_secs: float = 0.0
    """Time of its winner, measured in turns with all policies' winners, one protocol for all; 0 where none is right."""
    first_secs: float = 0.0
    """Time, in the same race, of the first candidate in the policy's order that is right: what it chooses unmeasured; 0 for a tuner."""
    share: float = 0.0
    """Of the peak of arithmetic, or of the memory's bandwidth where that is the limit."""
    error: float | None = None
    """Relative error of the winner."""
    winner: str = ""
    proposed_by: str = ""
    """The policy that has proposed the winner, where the one that was asked is a list or stands for several."""
    tried: int = 0
    right: int = 0
    """Candidates that passed verification."""
    search_secs: float = 0.0
    compile_secs: float = 0.0
    measure_secs: float = 0.0
    ask_secs: float = 0.0
    curve: tuple[tuple[float, float], ...] = ()
    """Seconds of the search after which it had a better candidate, and that one's time."""
    failure: str = ""


def by_entry(searches: Sequence[Searched]) -> dict[str, list[Searched]]:
    """Return the searches of each entry, in their order."""
    found: dict[str, list[Searched]] = {}
    for each in searches:
        found.setdefault(each.entry, []).append(each)
    return found


def wins(searches: Sequence[Searched]) -> dict[str, int]:
    """Return for each policy on how many entries its winner is the fastest, or as fast within noise."""
    counts = Counter(each.policy for several in by_entry(searches).values() for each in fastest(several))
    return {policy: counts[policy] for policy in dict.fromkeys(each.policy for each in searches)}


def fastest(searches: Sequence[Searched]) -> list[Searched]:
    """Return the searches of one entry whose winners are the fastest: several where noise hides a difference."""
    timed = [each for each in searches if each.run_secs]
    best = min((each.run_secs for each in timed), default=0.0)
    return [each for each in timed if each.run_secs <= best * (1 + NOISE)]


def of_best(searches: Sequence[Searched]) -> dict[str, float]:
    """Return for each policy the geometric mean, over the entries of which it has a winner, of the fastest's time by its own."""
    shares: dict[str, list[float]] = {}
    for several in by_entry(searches).values():
        best = min((each.run_secs for each in several if each.run_secs), default=0.0)
        for each in several:
            if each.run_secs:
                shares.setdefault(each.policy, []).append(best / each.run_secs)
    return {policy: math.exp(sum(map(math.log, found)) / len(found)) for policy, found in shares.items()}


def to_json(searches: Sequence[Searched], asked: Asked) -> Json:
    """Return all of it as JSON values."""
    entries = [
        {"entry": entry, "fastest": [each.policy for each in fastest(several)], "policies": [_row(each) for each in several]}
        for entry, several in by_entry(searches).items()
    ]
    return {"schema": 1, "asked": _asked_json(asked), "entries": entries, "wins": wins(searches), "of_best": of_best(searches)}


def _asked_json(asked: Asked) -> Json:
    return {"policies": dict(asked.policies), "budget": dict(asked.budget), "warm": sorted(asked.warm)}


def _row(each: Searched) -> Json:
    named = {name: value for name, value in vars(each).items() if name not in {"entry", "curve"}}
    return {**named, "curve": [list(point) for point in each.curve]}
