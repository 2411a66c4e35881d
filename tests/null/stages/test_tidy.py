"""Owns the tests that builds keep the store within its limit, once a day, and never remove what anything refers to.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.git import git
from support.spaces import Space

from kerneldecl.planning.workspace import IMPORTED
from kerneldecl.stages.tidy import STAMP
from kerneldecl.store.lock import in_use

DAY_SECS = 86400


@pytest.fixture
def space(fakes: Space) -> Space:
    """Return a workspace with hardly any room, built twice: what the first build left is old."""
    fakes.edit("workloads.toml", "[defaults]", "[limits]\nstore_gb = 1e-9\n\n[defaults]")
    assert fakes.command("build", runner=FakeRunner()).code == 0
    git(fakes, "init", "-q", "-b", "main")
    git(fakes, "add", "workloads.lock")
    git(fakes, "commit", "-qm", "first")
    return fakes


def age(space: Space, days: float) -> None:
    when = time.time() - days * DAY_SECS
    for path in (space.root / "cache").rglob("*"):
        os.utime(path, (when, when))


def tuned(space: Space) -> set[str]:
    return {path.stem for path in space.records("tune")}


def rebuilt(space: Space, old: str, new: str) -> str:
    space.edit("workloads.toml", old, new)
    done = space.command("build", runner=FakeRunner())
    assert done.code == 0, done.err
    return done.err


def test_what_nothing_refers_to_goes_once_a_day(space: Space) -> None:
    git(space, "checkout", "-q", "-b", "side")
    git(space, "branch", "-D", "main")
    first = tuned(space)
    age(space, 2)
    rebuilt(space, "factor = 3.0", "factor = 4.0")
    assert first <= tuned(space), "a branch's lock names it"
    git(space, "add", "workloads.lock")
    git(space, "commit", "-q", "--amend", "-m", "second")
    age(space, 2)
    said = rebuilt(space, "factor = 4.0", "factor = 5.0")
    assert "files of the store that were not used for long" in said
    gone = first - tuned(space)
    assert len(gone) == 1, "of the one entry that was edited, what neither a branch nor this lock names"
    # The same day nothing is looked at again.
    (space.root / "cache" / STAMP).touch()
    before = tuned(space)
    rebuilt(space, "factor = 5.0", "factor = 6.0")
    rebuilt(space, "factor = 6.0", "factor = 7.0")
    assert before < tuned(space)


def test_nothing_goes_while_another_build_is_at_work(space: Space) -> None:
    rebuilt(space, "factor = 3.0", "factor = 4.0")
    git(space, "add", "workloads.lock")
    git(space, "commit", "-q", "--amend", "-m", "second")
    age(space, 2)
    before = tuned(space)
    with in_use(space.root / "cache"):
        rebuilt(space, "factor = 4.0", "factor = 5.0")
    assert before < tuned(space)


def test_packages_that_nothing_imports_go(space: Space) -> None:
    left: Path = space.root / "cache" / IMPORTED / ("0" * 64)
    left.mkdir(parents=True)
    age(space, 2)
    rebuilt(space, "factor = 3.0", "factor = 4.0")
    assert not left.exists()
