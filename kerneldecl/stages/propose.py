"""Owns the stage that asks policies: every computation whose candidates are unknown gets the list of them.

Knows nothing of policies: a worker asks them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from kerneldecl.planning.plan import EntryPlan, reads_records
from kerneldecl.runners.process import Answer
from kerneldecl.serial import arch_to_json
from kerneldecl.stages.session import Session
from kerneldecl.tuning.nearest import Nearest
from kerneldecl.tuning.task import PROPOSE_SECS

KEPT_EVERY_SECS = 0.2
"""What policies have answered is kept so often: to look whether kerneldecl was changed meanwhile takes as long as an answer."""


def propose_entries(session: Session) -> None:
    """Have the policies of every entry propose candidates, where they or what they see has changed."""
    nearest: dict[bool, Nearest] = {}
    answered: list[tuple[EntryPlan, Answer]] = []
    kept = time.monotonic()
    wanted = session.pending("propose")
    for entry in wanted:
        answer = ask_policies(session, entry, _recorded(session, entry, nearest))
        if "failure" in answer:
            session.fail(entry.action("propose"), answer["failure"])
            if session.is_over:
                break
        else:
            answered.append((entry, answer))
        if time.monotonic() - kept > KEPT_EVERY_SECS:
            keep_proposed(session, answered)
            answered, kept = [], time.monotonic()
    keep_proposed(session, answered)
    if wanted:
        session.replan()


def ask_policies(session: Session, entry: EntryPlan, recorded: Mapping[str, Any] = MappingProxyType({})) -> Answer:
    """Return what an entry's policies propose; `recorded` is the field with what records tell them."""
    assert entry.lowered is not None, "what is proposed for is lowered"
    where = {"device": "policy", "model": "", "root": str(session.workspace.sources), "policies": entry.asked}
    asked = {"space": entry.lowered.space_json, "arch": arch_to_json(entry.arch), "top_k": entry.workload.top_k}
    return session.runner.measure({"action": "propose", **where, **asked, **recorded}, PROPOSE_SECS)


def keep_proposed(session: Session, answered: Sequence[tuple[EntryPlan, Answer]]) -> None:
    """Keep what policies have proposed."""
    if answered:
        session.workspace.check_current()
    for entry, answer in answered:
        session.keep(entry.action("propose"), answer, is_local=entry.arch.is_detected)


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
