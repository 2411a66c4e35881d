"""Owns the share of a model's work that runs on the fallback: the template that fits every function and is tuned to none.

Knows nothing of where the figures are from, nor of how a build went.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.planning.plan import EntryPlan

_CALLS = re.compile(r"(?P<model>.+)\.calls-(?P<calls>\d+)")


@dataclass(frozen=True)
class Call:
    """What a model, or nobody in particular, calls of one entry."""

    name: str
    calls: int
    flops: float
    """Operations of one call."""
    least_bytes: float
    is_fallback: bool


def fallback_shares(entries: Iterable[EntryPlan]) -> list[dict[str, Any]]:
    """Return the share of the fallback for each target and each model that has any; entries without a model's tag are one group."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for entry in entries:
        if entry.lowered is None or entry.tuned is None:
            continue
        for model, calls in (calls_of(entry.workload.tags) or {"": 1}).items():
            work = (calls, entry.lowered.flops, entry.lowered.least_bytes)
            call = Call(entry.workload.name, *work, is_fallback=entry.tuned.winner.is_fallback)
            groups.setdefault((entry.workload.target, model), []).append(call)
    shares = [{"target": target, "model": model, **share(calls)} for (target, model), calls in groups.items()]
    return [found for found in shares if found["fallbacks"]]


def calls_of(tags: Sequence[str]) -> dict[str, int]:
    """Return how often each model calls an entry, by the entry's tags."""
    return {match["model"]: int(match["calls"]) for tag in tags if (match := _CALLS.fullmatch(tag))}


def share(calls: Sequence[Call]) -> dict[str, Any]:
    """Return how many entries there are, which of them run on the fallback, most bytes first, and their share of the work."""
    slow = sorted((call for call in calls if call.is_fallback), key=lambda call: -call.calls * call.least_bytes)
    return {
        "entries": len(calls),
        "fallbacks": [call.name for call in slow],
        "operations": _ratio(sum(c.calls * c.flops for c in slow), sum(c.calls * c.flops for c in calls)),
        "bytes": _ratio(sum(c.calls * c.least_bytes for c in slow), sum(c.calls * c.least_bytes for c in calls)),
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def share_text(found: Mapping[str, Any], what: str = "run on a fallback") -> str:
    """Return the share as a line."""
    names = f"{', '.join(found['fallbacks'][:5])}{' …' if len(found['fallbacks']) > 5 else ''}"
    place = f"{found['model'] or 'entries'} for {found['target']}"
    work = f"{_percent(found['operations'])} of operations, {_percent(found['bytes'])} of bytes"
    return f"{place}: {len(found['fallbacks'])} of {found['entries']} entries {what}: {work} ({names})"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} %" if ratio < 0.995 else f"{100 * ratio:.0f} %"
