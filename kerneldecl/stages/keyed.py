"""Owns whose winner an entry takes whose configurations are keyed: that of the first entry of its key that is tuned.

Knows nothing of how entries are tuned. Triton's autotuner shares a configuration so among calls whose key is the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

from kerneldecl.declare.policy_values import key_of
from kerneldecl.model import Candidate, Proposal, Workload
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.policies.nearest import distance
from kerneldecl.stages.session import Session
from kerneldecl.store.local import Record
from kerneldecl.store.results import Group, Proposed, TuneResult, groups_from_json, groups_to_json
from kerneldecl.tuning.nearest import arguments
from kerneldecl.tuning.task import Task


class Shared(NamedTuple):
    """A task whose keyed configurations are one, which has won for another entry."""

    task: Task
    candidate: Candidate


def shared_by(workload: Workload) -> Hashable:
    """Return what entries share that share a winner: all but the sizes that the key does not name; None where nothing is keyed."""
    key = key_of(workload.policy)
    if not key:
        return None
    fixed = tuple((name, value) for name, value in workload.attrs if name in key or type(value) is not int)
    return workload.target, workload.rule, workload.policy, workload.generation, key, fixed


def follows(session: Session, entry: EntryPlan) -> bool:
    """Say whether another entry of its key is declared before an entry."""
    own = shared_by(entry.workload)
    if own is None:
        return False
    first = next((each for each in session.plan.entries if shared_by(each.workload) == own), entry)
    return first.entry != entry.entry


def with_shared_winner(session: Session, entry: EntryPlan, task: Task) -> Shared | None:
    """Return a task that tries what has won for the first entry of its key that is tuned; None where none is, or nothing is keyed."""
    own = shared_by(entry.workload)
    if own is None:
        return None
    for other in session.plan.entries:
        if other.entry == entry.entry or shared_by(other.workload) != own:
            continue
        found = session.workspace.store.read("tune", other.action("tune").key, is_local=entry.arch.is_detected)
        if not isinstance(found, Record) or other.lowered is None:
            continue
        result = TuneResult(found.key, found.result)
        source = {"record": result.key, "arguments": arguments(other.lowered), "model": entry.arch.model}
        for group in task.groups:
            if '"key"' in group.options and (same := _same(group, result.winner)):
                groups = _replaced(task.groups, group, _narrowed(group, same, source))
                return Shared(replace(task, groups=groups), same.candidate)
    return None


def _same(group: Group, winner: Candidate) -> Proposal | None:
    """Return the configuration that has won as it is for this computation: what it leaves open may have other values here."""
    alike = (each for each in group.proposals if each.candidate.template == winner.template)
    return min(alike, key=lambda each: distance(each.candidate, winner), default=None)


def _narrowed(group: Group, only: Proposal, source: dict[str, str]) -> Group:
    """Return a group with one of its candidates alone."""
    (found,) = groups_from_json(groups_to_json([Proposed(group.policy, [only], searches=False, turn=group.turn, sources=[source])]))
    return replace(found, options=group.options)


def _replaced(groups: Sequence[Group], old: Group, new: Group) -> tuple[Group, ...]:
    return tuple(new if group is old else group for group in groups)
