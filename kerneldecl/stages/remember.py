"""Owns what a build leaves for the next one's explanations: its keys, why it ran what it ran, and what failed.

Knows nothing of how they are shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kerneldecl.planning import last_build
from kerneldecl.serial import trial_to_json
from kerneldecl.stages.session import Session


def remember(session: Session) -> None:
    """Keep the keys and the reasons of this build."""
    path = session.workspace.cache / "state.json"
    last = last_build.read_state(path)
    final = session.plan
    keys: dict[str, dict[str, str]] = {e.entry: {a.kind: a.key for a in e.actions if a.is_hit and a.kind != "build"} for e in final.entries}
    for linked in final.links:
        there = session.links.get(linked.target) or (linked if linked.is_hit else None)
        keys[linked.entry] = {"link": there.key} if there else last.keys.get(linked.entry, {})
    for entry, before in last.keys.items():
        keys[entry] = {**before, **keys[entry]} if entry in keys else keys.get(entry, {})
    kept = {entry: k for entry, k in keys.items() if k}
    last_build.write_state(path, replace(last, keys=kept, why=_reasons(session, last), failed=_failed(session, last)))


def _failed(session: Session, last: last_build.State) -> dict[str, dict[str, Any]]:
    """Return the failures that stand: those of this build, and earlier ones of entries that it did not get to."""
    waiting = {e.entry for e in session.plan.entries if not e.is_done}
    now = {
        entry: {"key": session.failed_keys[entry], "reason": reason, "trials": list(map(trial_to_json, session.failed_trials[entry]))}
        for entry, reason in session.failures.items()
    }
    return {entry: failed for entry, failed in {**last.failed, **now}.items() if entry in waiting}


def _reasons(session: Session, last: last_build.State) -> dict[str, list[dict[str, Any]]]:
    ran: dict[str, list[dict[str, Any]]] = {}
    for action in session.ran:
        ran.setdefault(action.entry, []).append({"kind": action.kind, "reason": action.reason, "changed": action.changed})
    return {**last.why, **ran}
