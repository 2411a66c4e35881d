"""Owns what a build leaves for the next one's explanations: its keys, and why it ran what it ran.

Knows nothing of how they are shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kerneldecl.planning import last_build
from kerneldecl.stages.session import Session


def remember(session: Session) -> None:
    """Keep the keys and the reasons of this build."""
    path = session.workspace.cache / "state.json"
    last = last_build.read_state(path)
    final = session.plan
    keys: dict[str, dict[str, str]] = {e.entry: {a.kind: a.key for a in e.actions if a.is_hit and a.kind != "build"} for e in final.entries}
    for linked in final.links:
        keys[linked.entry] = {"link": linked.key} if linked.is_hit else last.keys.get(linked.entry, {})
    for entry, before in last.keys.items():
        keys[entry] = {**before, **keys[entry]} if entry in keys else keys.get(entry, {})
    last_build.write_state(path, replace(last, keys={entry: k for entry, k in keys.items() if k}, why=_reasons(session, last)))


def _reasons(session: Session, last: last_build.State) -> dict[str, list[dict[str, Any]]]:
    ran: dict[str, list[dict[str, Any]]] = {}
    for action in session.ran:
        ran.setdefault(action.entry, []).append({"kind": action.kind, "reason": action.reason, "changed": action.changed})
    return {**last.why, **ran}
