"""Owns what a build leaves for the next one's explanations: its keys, why it ran what it ran, and what failed.

Knows nothing of how they are shown.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kerneldecl.planning import last_build, meanings, sources
from kerneldecl.planning.plan import EntryPlan, link_parts
from kerneldecl.serial import trial_to_json
from kerneldecl.stages.session import Session


def remember(session: Session) -> None:
    """Keep the keys and the reasons of this build."""
    path = session.workspace.cache / last_build.FILE
    last = last_build.read_state(path)
    final = session.plan
    keys: dict[str, dict[str, str]] = {e.entry: _keys(session, e) for e in final.entries}
    for linked in final.links:
        there = session.links.get(linked.target) or (linked if linked.is_hit else None)
        keys[linked.entry] = {"link": there.key} if there else last.keys.get(linked.entry, {})
    for entry, before in last.keys.items():
        keys[entry] = {**before, **keys[entry]} if entry in keys else keys.get(entry, {})
    kept = {entry: k for entry, k in keys.items() if k}
    last_build.write_state(path, replace(last, keys=kept, why=_reasons(session, last), failed=_failed(session, last)))
    _remember_sources(session, last)
    meanings.write_meanings(session.workspace.cache / meanings.FILE, session.workspace.reading)


def _keys(session: Session, entry: EntryPlan) -> dict[str, str]:
    keys: dict[str, str] = {a.kind: a.key for a in entry.actions if a.is_hit and a.kind != "build"}
    reference = session.workspace.inputs.references[entry.workload.rule]
    return {**keys, last_build.REFERENCE: reference} if entry.tuned else keys


def _remember_sources(session: Session, last: last_build.State) -> None:
    """Keep what is behind the digests of this build, and of earlier ones while an entry is not up to date since."""
    path = session.workspace.cache / sources.FILE
    known = sources.read_sources(path)
    linked = [e for e in session.plan.entries if e.tuned and e.workload.target in session.links]
    same = {target for target, action in session.links.items() if last.keys.get(target, {}).get("link") == action.key}
    kept = {e.entry: known.links[e.entry] for e in linked if e.workload.target in same and e.entry in known.links}
    links = {e.entry: kept.get(e.entry) or link_parts(e) for e in linked}
    now = replace(sources.sources_behind(session.workspace.behind, known), links=links)
    sources.write_sources(path, now.with_earlier(known) if session.plan.misses else now)


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
        ran.setdefault(action.entry, []).append(
            {"kind": action.kind, "reason": action.reason, "changed": action.changed, "causes": action.causes}
        )
    return {**last.why, **ran}
