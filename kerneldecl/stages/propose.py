"""Owns the stage that asks policies: every computation whose candidates are unknown gets the list of them.

Knows nothing of policies: a worker asks them.
"""

from __future__ import annotations

from kerneldecl.serial import to_json
from kerneldecl.stages.session import Session
from kerneldecl.tuning.task import PROPOSE_SECS


def propose_entries(session: Session) -> None:
    """Have the policies of every entry propose candidates, where they or what they see has changed."""
    workspace = session.workspace
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
