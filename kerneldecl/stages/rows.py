"""Owns the stage that chooses which kernel of several takes which number of rows, where that is known when they are called.

Knows nothing of how kernels are timed, nor of what an artifact makes of the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kerneldecl.planning.action import Action, State
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import task_of
from kerneldecl.store.local import Miss
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.toolchain.linkers import LINKERS
from kerneldecl.tuning.events import Finished
from kerneldecl.tuning.measure import measured_on
from kerneldecl.tuning.rows import Chosen, RowsKernel, by_tuned, choose
from kerneldecl.tuning.task import Task, batches_of


def choose_rows(session: Session) -> None:
    """Compare the kernels of each number of rows that is known at run time, at the numbers that are tuned and between them."""
    _fail_without_all(session)
    if any(entry.workload.rows and entry.entry in session.failures for entry in session.plan.entries):
        session.replan()  # the others are not to wait for what has failed
    waiting: dict[str, list[EntryPlan]] = {}
    for entry in session.entries:
        if (action := _action(entry)) and action.state is State.READY:
            waiting.setdefault(action.key, []).append(entry)
    for members in waiting.values():
        with scratch_folder() as folder:
            _choose(session, members, folder)
    if waiting:
        session.replan()


def _action(entry: EntryPlan) -> Action | None:
    return next((action for action in entry.actions if action.kind == "rows"), None)


def _fail_without_all(session: Session) -> None:
    """Fail the entries of which another declared number of rows has failed: a range would have no kernel."""
    failed = {
        (e.workload.target, e.workload.rows.name): e.entry
        for e in session.plan.entries
        if e.workload.rows and e.entry in session.failures and not e.workload.rows.is_between(dict(e.workload.attrs))
    }
    for entry in session.entries:
        if entry.workload.rows and (other := failed.get((entry.workload.target, entry.workload.rows.name))):
            session.fail(entry.action("tune"), f"{other} has failed, and {entry.workload.rows.name} needs a kernel for each range of rows")


def _choose(session: Session, members: Sequence[EntryPlan], folder: Path) -> None:
    """Keep the choice among the kernels of some entries, or fail them."""
    last, action = members[-1], _action(members[-1])
    rows = last.workload.rows
    assert action is not None, "these have rows"
    assert rows is not None, "these have rows"
    session.ran.append(action)
    task = task_of(session, last, folder)
    kernels = [_linked(session, entry, folder) for entry in members]
    can_measure = session.options.measure and not batches_of(session.runner) and not session.why_not_measured(last.arch)
    can_measure = can_measure and not any(entry.is_unmeasured for entry in members)
    chosen = choose(task, kernels, rows, session.runner) if can_measure else by_tuned(kernels, rows)
    if isinstance(chosen, str):
        for entry in members:
            session.fail(entry.action("tune"), chosen)
        return
    result = {**_result(chosen), "provenance": _provenance(session, task) if can_measure else {}}
    session.workspace.store.write("rows", action.manifest, result, is_local=last.arch.is_detected or not can_measure)
    session.report(Finished(f"{rows.name}@{last.workload.target}", "rows", _in_words(chosen, is_measured=can_measure)))


def _linked(session: Session, entry: EntryPlan, folder: Path) -> RowsKernel:
    """Return an entry's kernel in a library of its own."""
    assert entry.tuned is not None, "these are tuned"
    assert entry.workload.rows is not None, "these have rows"
    content = session.workspace.store.read_blob(entry.tuned.blobs["object"])
    assert not isinstance(content, Miss), "objects were rebuilt before"
    made = folder / f"{entry.tuned.blobs['object']}.o"
    made.write_bytes(content)
    LINKERS[entry.arch.kind](made.with_suffix(".so"), [made])
    return RowsKernel(entry.workload.rows.of(dict(entry.workload.attrs)), made.with_suffix(".so"), entry.tuned.symbol)


def _result(chosen: Chosen) -> dict[str, object]:
    secs = {str(number): {str(tuned): each for tuned, each in found.items()} for number, found in chosen.secs.items()}
    ranges = [list(each) for each in chosen.ranges]
    return {"ranges": ranges, "is_measured": bool(secs), "secs": secs, "verified": list(chosen.verified)}


def _provenance(session: Session, task: Task) -> dict[str, str]:
    found = measured_on(task, session.runner).get("provenance", {})
    return {str(name): str(value) for name, value in found.items()}


def _in_words(chosen: Chosen, *, is_measured: bool) -> str:
    shown = ", ".join(f"up to {upto}: that for {tuned}" for upto, tuned in chosen.ranges)
    return shown if is_measured else f"{shown} (not measured)"
