"""Owns what a build exchanges with a shared cache and imported packages: what others have found out comes, what is found out here goes.

Knows nothing of how they are reached. Without any, nothing is done.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kerneldecl.planning.action import State
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.workspace import Workspace
from kerneldecl.stages.session import Session
from kerneldecl.store.keys import digest
from kerneldecl.store.protocol import Wanted
from kerneldecl.store.remote import OBJECT_STORES
from kerneldecl.tuning.events import Finished, Note

if TYPE_CHECKING:
    from kerneldecl.store.shared import SharedStore

_LOOK_SECS = 0.5
_MOST_SECS = 300.0
"""What others say is believed for this long, whatever they say then."""


def exchange(session: Session) -> None:
    """Share what was found out so far, and fetch what the plan lacks, as long as that leads to more of the plan.

    Imports are asked first: they are here, and what they hold is pinned.
    """
    shared = session.workspace.shared
    if shared is not None:
        shared.share()
    sources = [*_imports(session), *([shared] if shared is not None else [])]
    while sum(source.fetch(_lacking(session)) for source in sources):
        session.replan()


def _imports(session: Session) -> list[SharedStore]:
    """Return the imported packages to fetch from, as far as anything is lacking."""
    if not session.workspace.declaration.imports:
        return []
    from kerneldecl.stages.imports import imported  # what imports nothing needs no packages
    from kerneldecl.stages.lock import lock_on_disk

    return list(imported(session, lock_on_disk(session.workspace), lacks_records=any(True for _ in _lacking(session))))


def shared_with_workers(workspace: Workspace) -> dict[str, Any]:
    """Return where workers find what others have compiled; nothing without a cache that answers."""
    shared, cache = workspace.shared, workspace.declaration.cache
    if cache is None or shared is None or not shared.is_open or cache.url.startswith(tuple(f"{scheme}:" for scheme in OBJECT_STORES)):
        return {}  # workers run candidates: they get no credentials of a cloud
    return {"url": shared.url, "trusted": list(cache.trusted)}


def in_own_order(session: Session, waiting: Sequence[EntryPlan]) -> list[EntryPlan]:
    """Return what is to be tuned in an order that each build that shares has to itself: builds that begin together meet seldom."""
    if session.workspace.shared is None:
        return list(waiting)
    here = f"{os.uname().nodename} {os.getpid()} {session.workspace.root}"
    return sorted(waiting, key=lambda entry: digest(f"{here} {entry.entry}".encode()))


def is_left_to_another(session: Session, entry: EntryPlan) -> bool:
    """Say whether another build that shares is tuning an entry; if none is, this one has said that it does."""
    shared, action = session.workspace.shared, entry.action("tune")
    if shared is None or session.is_wanted_again(entry.entry, action.key):
        return False
    return not shared.claim(Wanted("tune", action.key, entry.arch.is_detected))


def not_tuned_by_others(session: Session, awaited: Sequence[EntryPlan]) -> Iterator[EntryPlan]:
    """Wait for the records that other builds have said they make, and yield each entry of which that does not come true."""
    waiting, began = list(awaited), time.monotonic()
    if waiting:
        session.report(Note(f"waiting for {len(waiting)} entries that other builds are tuning"))
    while waiting and not session.is_over:
        waiting = [entry for entry in waiting if not was_tuned_elsewhere(session, entry)]
        is_long = time.monotonic() - began > _MOST_SECS
        for entry in [entry for entry in waiting if is_long or not is_left_to_another(session, entry)]:
            waiting.remove(entry)
            yield entry
        time.sleep(_LOOK_SECS if waiting else 0.0)


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
