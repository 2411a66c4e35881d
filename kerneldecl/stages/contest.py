"""Owns the contest of policies: each searches every entry in a store of its own, then their winners race each other.

Knows nothing of how results are shown, or of how a policy searches.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from kerneldecl.compare.searches import Searched
from kerneldecl.diagnostics.units import duration
from kerneldecl.errors import TuningError
from kerneldecl.model import Proposal, Trial
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import reporter, task_of
from kerneldecl.store.protocol import Store
from kerneldecl.store.results import Proposed, groups_from_json, groups_to_json
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.tuning.clocked import Clocked
from kerneldecl.tuning.events import Finished
from kerneldecl.tuning.measure import prepare
from kerneldecl.tuning.no_winner import why_no_winner
from kerneldecl.tuning.search import least_secs, tune
from kerneldecl.tuning.task import OnProgress, Runner, Task


class Contender(NamedTuple):
    """A policy, and a build in a workspace of its own in which it has been asked and nothing is measured."""

    policy: str
    session: Session


class Found(NamedTuple):
    """What a policy's search has found before its winner has raced those of others."""

    searched: Searched
    winner: Trial | None = None
    first: Trial | None = None
    """The first candidate in the policy's order that is right."""


def contest(contenders: Sequence[Contender], runner: Runner) -> Iterator[Searched]:
    """Yield what each policy's search came to, entry by entry: what changes on the machine over time meets all policies."""
    planned = [{entry.entry for entry in session.plan.entries} for _, session in contenders]
    for name in (entry.entry for entry in contenders[0].session.plan.entries if all(entry.entry in each for each in planned)):
        with scratch_folder() as folder:
            found = [_found(each, name, runner, folder / str(place)) for place, each in enumerate(contenders)]
            yield from _raced(contenders[0].session, name, found, runner, folder / "winners")


@dataclass
class _Curve:
    """Passes progress on, and notes when a search had a better candidate."""

    onward: OnProgress
    begun: float = field(default_factory=time.perf_counter)
    points: list[tuple[float, float]] = field(default_factory=list)

    def __call__(self, doing: str, done: int, total: int, best_secs: float | None) -> None:
        self.onward(doing, done, total, best_secs)
        if doing == "timed" and best_secs and (not self.points or best_secs < self.points[-1][1]):
            self.points.append((round(time.perf_counter() - self.begun, 3), best_secs))


def _found(contender: Contender, name: str, runner: Runner, folder: Path) -> Found:
    """Have one policy search an entry."""
    policy, session = contender
    if name in session.failures:
        return Found(Searched(name, policy, failure=session.failures[name]))
    entry = _entry(session, name)
    task, clocked = _task(session, entry, folder), Clocked(runner)
    prepare(task, runner)  # inputs and reference are there for all policies, or the first would pay for them
    curve = _Curve(reporter(session, entry))
    try:
        outcome = tune(task, clocked, session.workspace.store, curve)
    except TuningError as error:
        return Found(Searched(name, policy, failure=str(error)))
    searched = Searched(
        entry=name,
        policy=policy,
        tried=len(outcome.trials),
        right=sum(bool(trial.samples) for trial in outcome.trials),
        search_secs=round(time.perf_counter() - curve.begun, 3),
        compile_secs=round(clocked.compile_secs, 3),
        measure_secs=round(clocked.measure_secs, 3),
        ask_secs=round(clocked.ask_secs, 3),
        curve=tuple(curve.points),
    )
    if not outcome.policy:
        return Found(replace(searched, failure=why_no_winner(outcome.trials, task.groups)))
    winner = outcome.trials[0]
    session.report(Finished(f"{name} by {policy}", "tune", f"{winner.candidate} {duration(winner.run_secs)}"))
    return Found(
        replace(searched, winner=str(winner.candidate), proposed_by=outcome.policy, error=winner.error),
        winner,
        _first(task, outcome.trials),
    )


def _first(task: Task, trials: Sequence[Trial]) -> Trial | None:
    """Return the first right candidate of what is proposed without a measurement."""
    right = {trial.candidate: trial for trial in trials if trial.samples}
    listed = (proposal.candidate for group in task.groups for proposal in group.proposals)
    return next((right[candidate] for candidate in listed if candidate in right), None)


def _raced(session: Session, name: str, found: Sequence[Found], runner: Runner, folder: Path) -> Iterator[Searched]:
    """Yield the searches with the times of their winners in one race: times of different searches do not compare."""
    named = [trial for each in found for trial in (each.winner, each.first) if trial]
    proposals = {trial.candidate: Proposal(trial.candidate, trial.predicted_secs) for trial in named}
    if not proposals:
        yield from (each.searched for each in found)
        return
    task = _task(session, _entry(session, name), folder)
    groups = groups_from_json(groups_to_json([Proposed("winners", tuple(proposals.values()), searches=False)]))
    task = replace(task, groups=groups, has_spares=False, workload=replace(task.workload, budget=()), is_again=True)
    trials = {trial.candidate: trial for trial in tune(task, runner, session.workspace.store, lambda *_: None).trials}
    for searched, winner, first in found:
        raced = trials[winner.candidate] if winner else None
        if raced and raced.samples:
            first_secs = trials[first.candidate].run_secs if first and trials[first.candidate].samples else 0.0
            share = round(least_secs(task) / raced.run_secs, 4)
            yield replace(searched, run_secs=raced.run_secs, first_secs=first_secs, share=share, error=raced.error)
        else:
            yield replace(searched, failure=raced.failure) if raced else searched


def _entry(session: Session, name: str) -> EntryPlan:
    return next(entry for entry in session.plan.entries if entry.entry == name)


def _task(session: Session, entry: EntryPlan, folder: Path) -> Task:
    """Return an entry's task as a build makes it, of which nothing is known; finalists are timed by one protocol alone."""
    return replace(task_of(session, entry, folder), times_finalists=False)


def copy_others(known: Store, to: Store, own: Collection[str]) -> None:
    """Copy the records that tell what was measured of other computations than a contest's own."""
    for is_local in (False, True):
        for kind in ("lower", "tune"):
            for record in known.all(kind, is_local=is_local):
                if record.result.get("computation") not in own:
                    to.write(kind, record.manifest, record.result, is_local=is_local)
