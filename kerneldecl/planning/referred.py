"""Owns what a workspace refers to: the keys of its locks, here and in git revisions, and of its last build.

Knows nothing of what is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kerneldecl.errors import DeclarationError, Problem
from kerneldecl.planning import last_build, lockfile
from kerneldecl.planning.git_files import git_files, tracked_files
from kerneldecl.planning.workspace import LOCK
from kerneldecl.store.collect import Kept


def referred(root: Path, revisions: Sequence[str]) -> Kept:
    """Return what must be kept: what locks of the workspace and of the revisions name, what its last build used, what git keeps.

    Raise DeclarationError for what is no revision with a lock.
    """
    locks = [path.read_text(encoding="utf-8", errors="replace") for path in root.glob("*.lock") if path.is_file()]
    for revision in revisions:
        (content,) = git_files(root, revision, [LOCK])
        if content is None:
            raise DeclarationError([Problem("--keep-ref", f"{revision} is no git revision with a {LOCK}")])
        locks.append(content.decode(errors="replace"))
    last = last_build.read_state(root / "cache" / last_build.FILE)
    keys = {key for lock in locks for key in lockfile.keys_by_entry(lock).values()}
    keys |= {key for found in last.keys.values() for key in found.values()}
    return Kept(keys, tracked_files(root, "cache"))
