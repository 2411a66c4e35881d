"""Owns what a build exchanges with a shared cache: what others have found out comes, what is found out here goes.

Knows nothing of how the cache is reached. Without one, nothing is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from kerneldecl.planning.action import State
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import Workspace
from kerneldecl.stages.session import Session
from kerneldecl.store.keys import digest
from kerneldecl.store.protocol import Wanted
from kerneldecl.tuning.events import Finished, Note


def exchange(session: Session) -> None:
    """Share what was found out so far, and fetch what the plan lacks, as long as that leads to more of the plan."""
    shared = session.workspace.shared
    if shared is None:
        return
    shared.share()
    while shared.fetch(_lacking(session)):
        session.replan()


def shared_with_workers(workspace: Workspace) -> dict[str, Any]:
    """Return where workers find what others have compiled; nothing without a cache that answers."""
    shared, cache = workspace.shared, workspace.declaration.cache
    if cache is None or shared is None or not shared.is_open:
        return {}
    return {"url": shared.url, "trusted": list(cache.trusted)}


def in_own_order(session: Session, waiting: Sequence[EntryPlan]) -> list[EntryPlan]:
    """Return what is to be tuned, begun at another place by each build that shares: what others tune meanwhile need not be tuned here."""
    if session.workspace.shared is None or not waiting:
        return list(waiting)
    here = f"{os.uname().nodename} {os.getpid()} {session.workspace.root}"
    begin = int(digest(here.encode())[:8], 16) % len(waiting)
    return [*waiting[begin:], *waiting[:begin]]


def was_tuned_elsewhere(session: Session, entry: EntryPlan) -> bool:
    """Say whether another machine has tuned an entry since this build began; its record is here then."""
    shared, action = session.workspace.shared, entry.action("tune")
    if shared is None or session.is_wanted_again(entry.entry, action.key):
        return False
    if not shared.fetch([Wanted("tune", action.key, entry.arch.is_detected)], anew=True):
        return False
    session.report(Finished(entry.entry, "tune", "from the shared cache"))
    return True


def share_all(session: Session) -> None:
    """Share what this build has made and what it is made of, wait for that, and say what came and went."""
    shared = session.workspace.shared
    if shared is None:
        return
    if session.ran:
        shared.share((*shared.made_by_workers(), *_done(session)))
    shared.finish()
    if shared.fetched or shared.shared:
        session.report(Note(f"shared cache: {shared.fetched} records fetched, {shared.shared} written"))


def _lacking(session: Session) -> Iterator[Wanted]:
    """Yield what could make up for an action that has to run, or for a choice that nobody has measured."""
    for entry in session.entries:
        is_local = entry.arch.is_detected
        for action in entry.actions:
            is_again = action.kind == "tune" and session.is_wanted_again(entry.entry, action.key)
            if action.state is State.READY and not is_again:
                # Blobs come with the record of their winner.
                kind, key = ("tune", entry.action("tune").key) if action.kind == "build" else (action.kind, action.key)
                yield Wanted(kind, key, is_local)
        if entry.is_unmeasured:
            yield Wanted("tune", entry.action("tune").key, is_local)


def _done(session: Session) -> Iterator[Wanted]:
    for entry in session.plan.entries:
        for action in entry.actions:
            if action.is_hit and action.kind != "build":
                yield Wanted(action.kind, action.key, entry.arch.is_detected)
