"""Owns the tests that workspaces of the user's cache go when nobody has used them for long, and nothing else does."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kerneldecl.store.lock import in_use
from kerneldecl.store.workspaces import UNUSED_SECS, remove_unused

FILE = "module.pt2"


def workspace(parent: Path, name: str, *, is_old: bool, file: str = FILE) -> Path:
    (parent / name / "cache").mkdir(parents=True)
    (parent / name / file).write_text("")
    when = time.time() - UNUSED_SECS - 60 if is_old else time.time() - UNUSED_SECS + 3600
    os.utime(parent / name / file, (when, when))
    return parent / name


def test_old_workspaces_go(tmp_path: Path) -> None:
    old, own = workspace(tmp_path, "old", is_old=True), workspace(tmp_path, "own", is_old=True)
    busy, young = workspace(tmp_path, "busy", is_old=True), workspace(tmp_path, "young", is_old=False)
    other, elsewhere = workspace(tmp_path, "other", is_old=True, file="x"), workspace(tmp_path / "..elsewhere", "kept", is_old=True)
    (tmp_path / "link").symlink_to(elsewhere)
    with in_use(busy / "cache"):
        assert remove_unused(tmp_path, FILE, but=own) == [old]
    assert not old.exists()
    assert all(path.exists() for path in (own, busy, young, other, elsewhere / FILE))
    assert remove_unused(tmp_path / "nowhere", FILE, but=own) == []
