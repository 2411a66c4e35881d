"""Owns which entries of a workspace the patterns of a command line select: those that ask for an entry's state are told by the plan.

Knows nothing of what is done with them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from kerneldecl.declare.select import Facts, select
from kerneldecl.model import Workload
from kerneldecl.planning.last_build import FILE, read_state
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import Workspace
from kerneldecl.stages.session import make_plan


def chosen(workspace: Workspace, patterns: Sequence[str]) -> tuple[Workload, ...]:
    """Return the workloads that the patterns select; raise PatternError for those that match nothing."""
    planned = functools.cache(lambda: make_plan(workspace).entries)
    failed = functools.cache(lambda: failures(workspace, planned()))

    def in_state(state: str) -> set[str]:
        if state == "failed":
            return {*failed()}
        if state == "stale":
            return {entry.entry for entry in planned() if not entry.is_done}
        return {entry.entry for entry in planned() if entry.tuned is None or not entry.tuned.is_measured}

    workloads = workspace.declaration.workloads
    if any(workload.rows for workload in workloads):  # numbers of rows for which no kernel is worth tuning are no entries
        there = {entry.entry for entry in planned()}
        workloads = tuple(workload for workload in workloads if workload.entry in there)
    return select(workloads, patterns, Facts(dict(workspace.declaration.targets), in_state))


def failures(workspace: Workspace, entries: Sequence[EntryPlan]) -> dict[str, str]:
    """Return why entries failed in the last build that tried them, as far as they are still as they were."""
    last = read_state(workspace.cache / FILE).failed
    keys = {entry.entry: {action.key for action in entry.actions if not action.is_hit} for entry in entries}
    return {entry: str(found["reason"]) for entry, found in last.items() if found["key"] in keys.get(entry, ())}
