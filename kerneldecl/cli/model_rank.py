"""Owns what `show --model` and `check --model` say of the order in which policies propose candidates.

Knows nothing of how an order comes about.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kerneldecl.cli.table import table, window
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.store.protocol import Store
from kerneldecl.tuning.model_rank import COUNTS, Change, ModelRank, TimedEarlier, geometric_mean, model_rank

Json = dict[str, Any]
_SHOWN = 40
"""Entries of a comparison that a terminal gets: those that changed most."""


def ranks_of(entries: Sequence[EntryPlan], store: Store) -> dict[str, ModelRank]:
    """Return how the policies' orders of now do, by entry, of those entries of which records hold times."""
    earlier = _timed(store)
    found = {}
    for entry in entries:
        if rank := _now(entry, earlier):
            found[entry.entry] = rank
    return found


def changes_of(entries: Sequence[EntryPlan], store: Store) -> list[Change]:
    """Return the orders of now beside those of the records, of those entries of which both are known."""
    earlier = _timed(store)
    changes = []
    for entry in entries:
        timed = earlier[entry.arch.is_detected].of(entry.action("tune").manifest)
        before = next(filter(None, (model_rank(group, timed.secs) for group in timed.groups)), None)
        now = _now(entry, earlier)
        if before and now:
            changes.append(Change(entry.entry, before, now))
    return changes


def _timed(store: Store) -> dict[bool, TimedEarlier]:
    sides = (False, True)
    return {side: TimedEarlier(store.all("tune", is_local=side), store.all("propose", is_local=side)) for side in sides}


def _now(entry: EntryPlan, earlier: Mapping[bool, TimedEarlier]) -> ModelRank | None:
    """Return the rank of the first policy that proposes anything that was timed."""
    manifest = entry.action("tune").manifest
    secs = earlier[entry.arch.is_detected].of(manifest).secs if manifest else {}
    return next(filter(None, (model_rank(group, secs) for group in entry.groups)), None) if secs else None


def ranks_json(ranks: Mapping[str, ModelRank]) -> Json:
    rows = [
        {
            "entry": entry,
            "policy": rank.policy,
            "rank_of_best": rank.rank,
            "timed": rank.timed,
            "proposed": rank.proposed,
            "first_by_best": rank.shares[0],
            "best_of": list(rank.shares),
        }
        for entry, rank in ranks.items()
    ]
    return {"schema": 1, "entries": rows, "geometric_means": _means(list(ranks.values()))}


def _means(ranks: Sequence[ModelRank]) -> dict[str, float]:
    return {str(count): geometric_mean([rank.share(count) for rank in ranks]) for count in COUNTS}


def ranks_text(json: Json) -> str:
    """Return a line for each entry: the fastest's place, and the shares of best-of-k; last their geometric means."""
    if not json["entries"]:
        return "no entry has measurements"
    head = ["entry", "policy", "best's rank", *(f"best of {count}" for count in COUNTS)]
    rows = [[row["entry"], row["policy"], _rank(row), *_shares(row["best_of"])] for row in json["entries"]]
    means = [f"geometric mean of {len(rows)}", "", "", *(f"{share:.3f}" for share in json["geometric_means"].values())]
    return "\n".join(table(head, [*rows, means], window()))


def _rank(row: Json) -> str:
    """Return the fastest's place among all that the policy proposes, of which some may not have been timed."""
    untimed = row["proposed"] - row["timed"]
    return f"{row['rank_of_best']} of {row['proposed']}{f', {untimed} not timed' if untimed else ''}"


def _shares(shares: Sequence[float]) -> list[str]:
    return [f"{shares[min(count, len(shares)) - 1]:.3f}" for count in COUNTS]


def changes_json(changes: Sequence[Change], worse: Sequence[str]) -> Json:
    rows = [
        {
            "entry": each.entry,
            "before": {"policy": each.before.policy, "rank_of_best": each.before.rank, "best_of": list(each.before.shares)},
            "now": {"policy": each.now.policy, "rank_of_best": each.now.rank, "best_of": list(each.now.shares), "timed": each.now.timed},
        }
        for each in changes
    ]
    means = {side: _means([getattr(each, side) for each in changes]) for side in ("before", "now")}
    return {"schema": 1, "entries": rows, "geometric_means": means, "worse": list(worse)}


def changes_text(json: Json) -> str:
    """Return what changed, the most first, and the geometric means of both sides."""
    rows = sorted(json["entries"], key=lambda row: min(now - before for before, now in _pairs(row)))
    changed = [row for row in rows if row["before"]["best_of"] != row["now"]["best_of"]]
    lines = [
        f"{row['entry']}: the best stood at {row['before']['rank_of_best']}, now at {row['now']['rank_of_best']};"
        f" the first gives {row['now']['best_of'][0]:.3f} of it, {row['before']['best_of'][0]:.3f} before"
        for row in changed[:_SHOWN]
    ]
    means = json["geometric_means"]
    shown = ", ".join(f"best of {count}: {means['now'][str(count)]:.4f} ({means['before'][str(count)]:.4f} before)" for count in COUNTS)
    return "\n".join([*lines, f"{len(json['entries'])} entries with times, {len(changed)} in another order; {shown}"])


def _pairs(row: Json) -> list[tuple[float, float]]:
    before, now = row["before"]["best_of"], row["now"]["best_of"]
    return [(before[min(k, len(before)) - 1], now[min(k, len(now)) - 1]) for k in COUNTS]
