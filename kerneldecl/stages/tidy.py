"""Owns what a build removes of itself, once a day: what the store holds beyond its limit, and packages that nothing imports any more.

Knows nothing of how a store is kept. While another build is at work nothing is removed.
"""

from __future__ import annotations

import contextlib
import shutil
import time

from kerneldecl.errors import LockHeldError
from kerneldecl.planning.git_files import git_files, local_branches
from kerneldecl.planning.lockfile import pins
from kerneldecl.planning.referred import referred
from kerneldecl.planning.workspace import IMPORTED, LOCK, Workspace
from kerneldecl.store.collect import Limits, collect, total_bytes
from kerneldecl.store.files import write_whole
from kerneldecl.store.lock import unused
from kerneldecl.tuning.events import Note, Report

STAMP = "tidied.txt"
"""File in the cache whose time says when this was last done."""
_EVERY_SECS = 24 * 3600.0
_MOST_BRANCHES = 50


def tidy(workspace: Workspace, report: Report) -> None:
    """Bring the store down to the declared limit, as `cache gc` does, if that was not done for a day."""
    stamp = workspace.cache / STAMP
    with contextlib.suppress(FileNotFoundError):
        if time.time() - stamp.stat().st_mtime < _EVERY_SECS:
            return
    with contextlib.suppress(LockHeldError), unused(workspace.cache):
        write_whole(stamp, "", durable=False)
        limit = int(workspace.declaration.limits.store_gb * 1e9)
        if total_bytes(workspace.own_store) > limit:  # what must stay is found out only then: it takes longer than linking
            done = collect(workspace.own_store, Limits(limit), referred(workspace.root, _branches(workspace)), is_dry=False)
            removed_mb = done.removed_bytes / 1e6
            if done.removed:
                report(Note(f"removed {len(done.removed)} files of the store that were not used for long, {removed_mb:.0f} MB"))
        _drop_imports(workspace)


def _branches(workspace: Workspace) -> list[str]:
    """Return the newest local branches that have a lock: what they refer to stays."""
    found = local_branches(workspace.root)[:_MOST_BRANCHES]
    return [branch for branch in found if git_files(workspace.root, branch, [LOCK]) != [None]]


def _drop_imports(workspace: Workspace) -> None:
    """Remove packages that neither the declaration nor the lock names, and what killed builds have left of others."""
    lock = workspace.root / LOCK
    text = lock.read_text(encoding="utf-8", errors="replace") if lock.is_file() else ""
    used = {each.digest for each in (*workspace.declaration.imports, *pins(text).values())}
    for folder in (workspace.cache / IMPORTED).glob("*"):
        if folder.name not in used:
            shutil.rmtree(folder, ignore_errors=True)
