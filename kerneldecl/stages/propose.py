"""Owns the stage that asks policies: every computation whose candidates are unknown gets the list of them.

Knows nothing of policies: a worker asks them.
"""

from __future__ import annotations

from typing import Any

from kerneldecl.planning.plan import EntryPlan, reads_records
from kerneldecl.serial import to_json
from kerneldecl.stages.session import Session
from kerneldecl.tuning.nearest import Nearest
from kerneldecl.tuning.task import PROPOSE_SECS


def propose_entries(session: Session) -> None:
    """Have the policies of every entry propose candidates, where they or what they see has changed."""
    workspace = session.workspace
    nearest: dict[bool, Nearest] = {}
    for entry in session.pending("propose"):
        assert entry.lowered is not None, "what is proposed for is lowered"
        action = entry.action("propose")
        asked = {"space": entry.lowered.space_json, "arch": to_json(entry.arch), "top_k": entry.workload.top_k}
        request = {
            "action": "propose",
            "device": "policy",
            "model": "",
            "root": str(workspace.sources),
            "policies": entry.asked,
            **asked,
            **_recorded(session, entry, nearest),
        }
        answer = session.runner.measure(request, PROPOSE_SECS)
        if "failure" in answer:
            session.fail(action, answer["failure"])
            if session.is_over:
                break
        else:
            workspace.check_current()
            workspace.store.write("propose", action.manifest, answer, is_local=entry.arch.is_detected)
    session.replan()


def _recorded(session: Session, entry: EntryPlan, nearest: dict[bool, Nearest]) -> dict[str, Any]:
    """Return what records tell of computations like an entry's, where a policy of it is given that.

    The records of a declared arch are those to commit, which are the same on every machine; a detected one's own lie in the local store.
    """
    if not reads_records(entry.workload, session.workspace.inputs):
        return {}
    assert entry.lowered is not None, "what is proposed for is lowered"
    store, is_local = session.workspace.store, entry.arch.is_detected
    if is_local not in nearest:
        sides = (False, True) if is_local else (False,)
        found = {kind: [record for side in sides for record in store.all(kind, is_local=side)] for kind in ("tune", "lower")}
        nearest[is_local] = Nearest(found["tune"], found["lower"])
    found_for = nearest[is_local].of(entry.lowered, entry.arch)
    return {"recorded": [[known.candidate.to_json(), dict(known.source)] for known in found_for]}
