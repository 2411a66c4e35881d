"""Owns the stage that rebuilds: objects, database lines and sources of winners that the store has lost, or never had.

Knows nothing of how winners were found: their records tell which candidates they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kerneldecl.planning.plan import EntryPlan
from kerneldecl.stages.conclude import describe
from kerneldecl.stages.session import Session
from kerneldecl.stages.tasks import task_of
from kerneldecl.store.scratch import scratch_folder
from kerneldecl.tuning.events import Finished
from kerneldecl.tuning.task import BUILD_SECS, Task


def rebuild_objects(session: Session) -> None:
    """Rebuild from their records the winners whose blobs are missing."""
    wanted = session.pending("build")
    if not wanted:
        return
    with scratch_folder() as folder:
        tasks = [task_of(session, e, folder) for e in wanted]
        requests = [task.build_request(e.tuned.winner, force=True) for task, e in zip(tasks, wanted, strict=True) if e.tuned]
        for index, answer in session.runner.run_all(requests, BUILD_SECS):
            _keep(session, wanted[index], tasks[index], answer)
    session.replan()


def _keep(session: Session, entry: EntryPlan, task: Task, answer: Mapping[str, Any]) -> None:
    assert entry.tuned is not None, "only what is tuned is built"
    action, tuned = entry.action("build"), entry.tuned
    if "failure" in answer:
        session.fail(action, f"the recorded winner cannot be built: {answer['failure']}")
        return
    rebuilt = session.workspace.own_store.write_blob(task.object_path(answer["code_digest"]).read_bytes())
    described = describe(session, task, tuned.winner)
    if isinstance(described, str):
        session.fail(action, described)
    elif differing := [name for name, blob in {"object": rebuilt, **described}.items() if blob != tuned.blobs[name]]:
        other, way_out = " and ".join(differing), f"--retune {entry.entry} or a higher `generation` tunes it again"
        session.fail(action, f"the recorded winner gives another {other} here; {way_out}")
    else:
        session.report(Finished(entry.entry, "build", "built from its record"))
