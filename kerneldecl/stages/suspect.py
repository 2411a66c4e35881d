"""Owns timings that are suspect: taken by another driver or under other clocks than this machine's. They are taken again, and none is lost.

Knows nothing of how candidates are built or timed.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.hardware.gpu_lock import gpus_of
from kerneldecl.model import Proposal, Trial
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.runners import nvml
from kerneldecl.stages.session import Session
from kerneldecl.store.local import Record
from kerneldecl.store.results import Group, Proposed, TuneResult, groups_from_json, groups_to_json
from kerneldecl.tuning.loop import Outcome

BEST = 3
"""Candidates that are timed again: those that a change of the device may put in another order."""
_KEPT = ("provenance", "conditions", "measured_peaks", "run_secs", "winner")


def why_suspect(entry: EntryPlan) -> str:
    """Return in what this machine differs from the one that timed an entry, as a phrase; empty where nothing known does.

    Of an entry whose GPU is not here nothing is known.
    """
    if entry.tuned is None or not entry.arch.gpu or why_not_measured_here(entry.arch):
        return ""
    return _difference(entry.tuned.provenance, _setting(entry.arch.model))


@functools.cache
def _setting(model: str) -> Mapping[str, str]:
    return nvml.setting(gpus_of(model)[0].uuid)


def _difference(then: Mapping[str, Any], now: Mapping[str, str]) -> str:
    changed = [name for name in now if then.get(name) and now[name] and then[name] != now[name]]
    return ", ".join(f"{name} {then[name]} then, {now[name]} now" for name in changed)


def suspects(entries: Sequence[EntryPlan]) -> frozenset[str]:
    return frozenset(entry.entry for entry in entries if why_suspect(entry))


def recorded(session: Session, entry: EntryPlan) -> TuneResult | None:
    """Return the record of an entry whose best are to be timed again, and were not yet; None for any other."""
    action = entry.action("tune")
    if entry.entry not in session.options.reverified or not session.is_wanted_again(entry.entry, action.key):
        return None
    found = session.workspace.store.read("tune", action.key, is_local=entry.arch.is_detected)
    return TuneResult(found.key, found.result) if isinstance(found, Record) else None


def best_of(before: TuneResult) -> tuple[Group, ...]:
    """Return the best candidates of a record, as if its winner's policy proposed them."""
    best = [Proposal(trial.candidate, trial.predicted_secs) for trial in _best(before)]
    return groups_from_json(groups_to_json([Proposed(before.policy, best, searches=False)]))


def _best(before: TuneResult) -> list[Trial]:
    return [trial for trial in before.trials if trial.samples][:BEST]


def with_others(outcome: Outcome, before: TuneResult) -> Outcome:
    """Return what became of the best, followed by a record's other candidates as they were timed before."""
    found = {trial.candidate for trial in outcome.trials}
    others = [replace(trial, timings=()) for trial in before.trials if trial.candidate not in found]
    return outcome._replace(trials=[*outcome.trials, *others])


def history(before: TuneResult) -> list[Mapping[str, Any]]:
    """Return the field `before` of a record that takes another's place: who had timed its best, when, and their samples."""
    samples = {trial.code_digest: list(trial.samples) for trial in _best(before)}
    then = {name: before.json[name] for name in _KEPT if name in before.json}
    return [*before.before, {**then, "samples": samples}]
