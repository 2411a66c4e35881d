"""Owns what `check --stale` reports: which entries the records do not settle, and what a device would have to do for them.

Knows nothing of exit codes. Objects to compile and artifacts to link make nothing stale: a build makes them of the records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kerneldecl.planning.action import Action
from kerneldecl.planning.plan import EntryPlan, tolerance
from kerneldecl.store.protocol import Store
from kerneldecl.tuning.earlier import Earlier, Known
from kerneldecl.tuning.forecast import forecast

CANDIDATE_SECS = 0.1
"""GPU seconds for one candidate: 37 entries of 20 took 74 s on an H200, 2026-11-22, benchmarks/RESULTS.md."""


@dataclass(frozen=True)
class Stale:
    """An entry that the records do not settle."""

    entry: str
    action: str
    """The first action that is to run."""
    reason: str
    device: str
    """What has to measure it: a model of GPU, or "CPU"."""
    candidates: int
    """How many candidates are to be measured, at most where they are not proposed yet."""
    is_accepted: bool
    """Whether the lock holds the entry as it is: somebody has committed that its measurements are wanting."""


def stale_entries(entries: Sequence[EntryPlan], store: Store, unmeasured: Collection[str], failures: Mapping[str, str]) -> list[Stale]:
    """Return the entries that have to be tuned, whose winner waits for measurements, or of which `failures` says why that is unknown."""
    earlier: dict[bool, Earlier] = {}
    found: list[Stale] = []
    for entry in entries:
        action = next((action for action in entry.actions if action.kind != "build" and not action.is_hit), None)
        if action is None and (entry.tuned is None or entry.tuned.is_settled):
            continue
        is_local = entry.arch.is_detected
        earlier.setdefault(is_local, Earlier(store.all("tune", is_local=is_local)))
        stale = _stale(entry, action or entry.action("tune"), earlier[is_local], unmeasured)
        found.append(replace(stale, reason=failures.get(entry.entry, stale.reason)))
    return found


def _stale(entry: EntryPlan, action: Action, earlier: Earlier, unmeasured: Collection[str]) -> Stale:
    tune = entry.action("tune")
    known = earlier.of(tune.manifest) if tune.manifest else None
    return Stale(
        entry=entry.entry,
        action=action.kind,
        reason=action.reason or _wanting(entry),
        device=entry.arch.model if entry.arch.gpu else "CPU",
        candidates=_wanted(entry, known),
        is_accepted=action.key in unmeasured or action.is_hit,
    )


def _wanting(entry: EntryPlan) -> str:
    assert entry.tuned is not None, "what is not tuned has a reason to be"
    if not entry.tuned.is_measured:
        return "its policy's choice, not measured"
    return f"{entry.tuned.coverage} candidates measured" if entry.tuned.coverage else "not verified by today's reference"


def _wanted(entry: EntryPlan, known: Known | None) -> int:
    if known is None or entry.lowered is None or not entry.groups:
        return entry.workload.top_k
    return forecast(entry.groups, known, tolerance(entry.workload, entry.lowered)).candidates


def stale_json(found: Sequence[Stale]) -> dict[str, Any]:
    """Return the entries, and for each device how many candidates it would have to measure and in how many minutes."""
    counts: dict[str, int] = {}
    for each in found:
        counts[each.device] = counts.get(each.device, 0) + each.candidates
    devices = {device: {"candidates": count, "minutes": round(count * CANDIDATE_SECS / 60, 2)} for device, count in counts.items()}
    return {"schema": 1, "stale": [vars(each) for each in found], "devices": devices}


def stale_text(json: Mapping[str, Any]) -> str:
    """Return a line for each entry, and one for each device."""
    width = max((len(each["entry"]) for each in json["stale"]), default=0)
    lines = [f"{each['action']:<8} {each['entry']:<{width}}  {each['reason']}" for each in json["stale"]]
    for device, work in json["devices"].items():
        if work["candidates"] and device != "CPU":
            lines.append(f"{device} would have to measure {work['candidates']} candidates: {work['minutes']:.2g} minutes")
    return "\n".join(lines or ["nothing has to be tuned"])
