"""Owns the stage that lowers: every rule whose computation is unknown becomes TensorIR.

Knows nothing of how rules are lowered: a worker does it.
"""

from __future__ import annotations

from kerneldecl.planning.plan import EntryPlan
from kerneldecl.rows import rows_field
from kerneldecl.stages.session import Session
from kerneldecl.stages.tune import built_at_once
from kerneldecl.tuning.task import BUILD_SECS


def lower_entries(session: Session) -> None:
    """Lower what has no known computation, while the workers start that candidates will want."""
    wanted = session.pending("lower")
    root = str(session.workspace.sources)
    workloads = [entry.workload for entry in wanted]
    requests = [
        {"action": "lower", "root": root, "rule": w.rule, "attrs": dict(w.attrs), **w.nan_field, **rows_field(w.rows, w.attrs)}
        for w in workloads
    ]
    answers = session.runner.run_all(requests, BUILD_SECS)
    if not session.options.locked:
        session.runner.start(built_at_once(session))  # they import while the first ones lower
    workspace, lowered = session.workspace, list[EntryPlan]()
    for index, answer in answers:
        entry, action = wanted[index], wanted[index].action("lower")
        if "failure" in answer:
            session.fail(action, f"lowering failed: {answer['failure']}")
        else:
            workspace.store.write("lower", action.manifest, answer, is_local=entry.arch.is_detected)
            lowered.append(entry)
    if not workspace.is_current():
        for entry in lowered:
            workspace.store.forget("lower", entry.action("lower").key, is_local=entry.arch.is_detected)
    workspace.check_current()
    session.replan()
