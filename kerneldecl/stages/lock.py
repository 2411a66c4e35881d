"""Owns the stages that check and write workloads.lock.

Knows nothing of how entries are tuned.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kerneldecl.errors import StaleError
from kerneldecl.planning import lockfile
from kerneldecl.planning.action import Action
from kerneldecl.planning.plan import EntryPlan, Plan
from kerneldecl.planning.workspace import LOCK, Workspace
from kerneldecl.stages.session import Session
from kerneldecl.store.files import write_whole
from kerneldecl.store.regular import read_file


def check_lock(session: Session) -> None:
    """Stop before anything is tuned if the lock would change and the user forbade it.

    An entry that the lock holds in want of measurements may be ranked again, and a missing one tried again: that gives what it gave, or
    `write_lock` finds it out. So does an edited rule or policy: it is lowered, or asked, and the lock is checked again.
    """
    if not session.options.locked:
        return
    text = lock_on_disk(session.workspace)
    unsettled = lockfile.unsettled_keys(text)
    untuned = [_first_miss(e) for e in session.plan.entries if not e.arch.is_detected and not e.tuned]
    if stale := [a.entry for a in untuned if (a.kind == "tune" or not text) and a.key not in unsettled]:
        raise StaleError(
            f"{LOCK} would change: {', '.join(stale[:5])} would be tuned; run `kerneldecl build` without --locked and commit the lock"
        )
    if not untuned and lock_of(session.workspace, session.plan) != text:
        raise _lock_would_change()


def write_lock(session: Session) -> None:
    """Write workloads.lock if every declared arch's entry has its record, or has failed and the artifact may lack it.

    An interrupted build leaves the lock as it is: the next one finds other winners.
    """
    if session.is_interrupted:
        return
    missing = () if session.options.require_all else session.failures.keys()
    path, text = session.workspace.root / LOCK, lock_of(session.workspace, session.plan, missing)
    if all(e.tuned or e.entry in missing for e in session.plan.entries if not e.arch.is_detected) and text != _read(path):
        if session.options.locked:
            raise _lock_would_change()
        write_whole(path, text, durable=False)


def lock_of(workspace: Workspace, current: Plan, missing: Collection[str] = ()) -> str:
    """Return the lock that the records make, with the entries without a record that are missing."""
    declaration = workspace.declaration
    entries = [(e.workload, e.arch, e.tuned or _first_miss(e).key) for e in current.entries if e.tuned or e.entry in missing]
    imports = lockfile.pinned(declaration.imports, lock_on_disk(workspace))
    return lockfile.lock_text((declaration.artifact, declaration.version), workspace.inputs.toolchain, entries, imports)


def _first_miss(entry: EntryPlan) -> Action:
    return next(action for action in entry.actions if not action.is_hit)


def lock_on_disk(workspace: Workspace) -> str:
    return _read(workspace.root / LOCK)


def _read(path: Path) -> str:
    try:
        return read_file(path).decode(errors="replace")  # what is not UTF-8 differs from every lock
    except FileNotFoundError:
        return ""


def _lock_would_change() -> StaleError:
    return StaleError(f"{LOCK} would change; run `kerneldecl build` without --locked and commit the lock")
