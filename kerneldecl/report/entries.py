"""Owns what a report tells of an entry by its plan and its records: candidates with their policies, shares, what is not ours.

Knows nothing of git, of events, or of how entries are drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kerneldecl.compare.verdict import Measured
from kerneldecl.model import Candidate, Trial
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.roofline import roofline_of
from kerneldecl.report.data import Entry, Other, Tried
from kerneldecl.store.results import Group, TuneResult
from kerneldecl.timing import timing_in_words
from kerneldecl.tuning.model_rank import rank_of_order
from kerneldecl.tuning.race import finalists

OTHERS: Mapping[str, str] = {"library": "vendor's library", "default": "TVM's default"}
"""Policies whose kernels are not ours, and whose they are."""


def entry_of(plan: EntryPlan, failed: Mapping[str, Any]) -> Entry:
    """Return an entry without what git, events and searches tell; `failed` is its failure in the last build, as that left it."""
    found = Entry(
        name=plan.entry,
        target=plan.workload.target,
        rule=plan.workload.rule,
        attrs=" ".join(f"{name}={_short(value)}" for name, value in plan.workload.attrs if value),
    )
    if plan.tuned is None:
        reason = str(failed.get("reason") or next(action.reason for action in plan.actions if not action.is_hit))
        return replace(found, reason=reason, tried=tuple(Tried(trial, "") for trial in failed.get("trials", ())))
    return _tuned(plan, plan.tuned, found)


def _tuned(plan: EntryPlan, tuned: TuneResult, found: Entry) -> Entry:
    assert plan.lowered is not None, "what is tuned is lowered"
    trials = [trial if are_times(trial.samples) else replace(trial, samples=()) for trial in tuned.trials]
    own = [group for group in plan.groups if group.policy == tuned.policy]
    orders = [[proposal.candidate for proposal in group.proposals] for group in own]
    policy_of = _policy_of(plan.groups, trials, {candidate: tuned.policy for order in orders for candidate in order})
    found = replace(
        found,
        roofline=roofline_of(plan),
        dtype=plan.lowered.dtype,
        is_measured=tuned.is_measured,
        policy=tuned.policy,
        timing=timing_in_words(plan.arch.kind, plan.workload.timing),
        tried=_tried(tuned, trials, policy_of),
    )
    if not (tuned.is_measured and is_time(tuned.run_secs) and trials[0].samples):
        return replace(found, is_measured=False)
    secs = {trial.candidate: trial.run_secs for trial in trials if trial.samples}
    ranks = (rank_of_order(tuned.policy, order, secs) for order in orders)
    rank = next(filter(None, ranks), None)
    return replace(
        found,
        run_secs=tuned.run_secs,
        others=tuple(_others(tuned, trials, policy_of)),
        best_of=rank.shares if rank else (),
        conditions=_conditions(tuned),
    )


def is_time(secs: float) -> bool:
    """Say whether seconds can be drawn: records may be anybody's."""
    return 0.0 < secs < math.inf


def are_times(samples: Sequence[float]) -> bool:
    return not samples or (math.isfinite(sum(samples)) and min(samples) > 0)


def measured_now(plan: EntryPlan) -> Measured | None:
    """Return an entry as comparisons take it; None where it has no winner."""
    if plan.tuned is None or not is_time(plan.tuned.run_secs) or not are_times(plan.tuned.trials[0].samples):
        return None
    tuned, winner = plan.tuned, plan.tuned.trials[0]
    return Measured(
        name=plan.entry,
        key=tuned.key,
        winner=str(tuned.winner),
        run_secs=tuned.run_secs if tuned.is_measured else None,
        is_verified=tuned.is_measured and tuned.is_verified,
        code=tuned.blobs["object"],
        samples=winner.samples,
        timing=timing_in_words(plan.arch.kind, plan.workload.timing),
        timings=winner.timings,
        manifest=plan.action("tune").manifest,
    )


def _tried(tuned: TuneResult, trials: Sequence[Trial], policy_of: Mapping[Candidate, str]) -> tuple[Tried, ...]:
    timed = [trial for trial in trials if trial.samples]
    tied = {id(trial) for trial in finalists(timed)} if tuned.tied else set()
    return tuple(Tried(trial, policy_of.get(trial.candidate, ""), id(trial) in tied) for trial in trials)


def _policy_of(groups: Sequence[Group], trials: Sequence[Trial], own: Mapping[Candidate, str]) -> dict[Candidate, str]:
    """Return the policy of each candidate: the winner's, if it proposes it, or the first other one that does."""
    found = {trial.candidate: own.get(trial.candidate, "") for trial in trials}
    waiting = {candidate for candidate, policy in found.items() if not policy}
    for group in groups:
        if any(candidate.template in group.templates for candidate in waiting):
            proposed = waiting.intersection(proposal.candidate for proposal in group.proposals)
            found |= dict.fromkeys(proposed, group.policy)
            waiting -= proposed
    # Of a tuner, records hold no list of what it has asked for.
    tuners = {template: group.policy for group in reversed(groups) for template in group.templates}
    return found | {candidate: tuners.get(candidate.template, "") for candidate in waiting}


def _others(tuned: TuneResult, trials: Sequence[Trial], policy_of: Mapping[Candidate, str]) -> Iterator[Other]:
    """Yield the fastest candidates that are not ours, beside the fastest of ours."""
    best: dict[str, float] = {}
    for trial in trials:
        whose = OTHERS.get(policy_of[trial.candidate])
        if whose and trial.samples:
            best[whose] = min(trial.run_secs, best.get(whose, trial.run_secs))
    ours = (trial.run_secs for trial in trials if best and trial.samples and policy_of[trial.candidate] not in OTHERS)
    fastest = min(ours, default=tuned.run_secs)
    yield from (Other(name, secs, fastest) for name, secs in best.items())


def _conditions(tuned: TuneResult) -> tuple[tuple[str, str], ...]:
    device = "gpu" if tuned.provenance.get("gpu") else "host"
    return tuple((name, str(tuned.provenance[name])) for name in (device, "driver", "clocks", "date") if tuned.provenance.get(name))


def _short(value: Any) -> str:
    if not isinstance(value, tuple | list):
        return str(value)
    return ("," if any(isinstance(item, str) for item in value) else "x").join(map(str, value))
