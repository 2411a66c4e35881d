"""Owns the removal of whole workspaces that were made for the user, in a folder of the user's cache, and not used for long.

Knows nothing of what is built in them.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from kerneldecl.errors import LockHeldError
from kerneldecl.store.lock import unused

UNUSED_SECS = 60 * 24 * 3600.0


def remove_unused(parent: Path, file: str, *, but: Path) -> list[Path]:
    """Remove the workspaces below a folder whose file of this name was not written for 60 days; return them.

    What has no such file is none of them. The workspace `but` stays, and so does one where a build is at work.
    """
    removed = []
    for folder in (found.parent for found in parent.glob(f"*/{file}") if time.time() - found.lstat().st_mtime > UNUSED_SECS):
        if folder != but and not folder.is_symlink():
            with contextlib.suppress(LockHeldError), unused(folder / "cache"):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
    return removed
