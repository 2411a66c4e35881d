"""Owns the stage that lowers: every rule whose computation is unknown becomes TensorIR.

Knows nothing of how rules are lowered: a worker does it.
"""

from __future__ import annotations

from typing import Any

from kerneldecl.planning.plan import EntryPlan
from kerneldecl.rows import rows_field
from kerneldecl.stages.session import Session
from kerneldecl.stages.tune import built_at_once
from kerneldecl.tuning.task import BUILD_SECS


def lower_entries(session: Session) -> None:
    """Lower what has no known computation, while the workers start that candidates will want."""
    wanted = session.pending("lower")
    answers = session.runner.run_all([lower_request(session, entry) for entry in wanted], BUILD_SECS)
    if not session.options.locked and (count := built_at_once(session)):
        session.runner.start(count)  # they import while the first ones lower
    workspace, lowered = session.workspace, list[EntryPlan]()
    for index, answer in answers:
        entry, action = wanted[index], wanted[index].action("lower")
        if "failure" in answer:
            session.fail(action, f"lowering failed: {answer['failure']}")
        else:
            session.keep(action, answer, is_local=entry.arch.is_detected)
            lowered.append(entry)
    if not workspace.is_current():
        for entry in lowered:
            workspace.store.forget("lower", entry.action("lower").key, is_local=entry.arch.is_detected)
    workspace.check_current()
    if wanted:
        session.replan()


def lower_request(session: Session, entry: EntryPlan) -> dict[str, Any]:
    """Return the request that lowers an entry's rule."""
    workload = entry.workload
    declared = {"rule": workload.rule, "attrs": dict(workload.attrs), **workload.nan_field, **rows_field(workload.rows, workload.attrs)}
    return {"action": "lower", "root": str(session.workspace.sources), **declared}
