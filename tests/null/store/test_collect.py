"""Owns the tests of `cache gc`: limits hold, the least recently used goes first, and what anything refers to stays.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from support.fakes import DieRunner, FakeRunner
from support.git import git
from support.spaces import FAKES, Space

from kerneldecl.errors import ExitCode
from kerneldecl.store.local import LocalStore
from kerneldecl.store.lock import in_use, unused

DAY_SECS = 86400


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """A workspace with two states: `before` is a git revision, and what is there now was built later."""
    space = Space(tmp_path_factory.mktemp("collect")).write(FAKES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        assert space.command("build", runner=FakeRunner()).code == 0
        git(space, "init", "-q")
        git(space, "add", "workloads.lock")
        git(space, "commit", "-qm", "before")
        git(space, "tag", "before")
        space.edit("workloads.toml", "factor = 3.0", "factor = 4.0")
        assert space.command("build", runner=FakeRunner()).code == 0
    return space


@pytest.fixture
def space(pristine: Space, tmp_path: Path) -> Space:
    subprocess.run(["cp", "-r", str(pristine.root), str(tmp_path / "space")], check=True)
    for index, path in enumerate(files(Space(tmp_path / "space"))):
        used(path, days_ago=100 + index)
    return Space(tmp_path / "space")


def files(space: Space) -> list[Path]:
    return sorted(path for name in ("record", "local", "blob") for path in (space.root / "cache" / name).glob("*/*"))


def used(path: Path, days_ago: float) -> None:
    when = time.time() - days_ago * DAY_SECS
    os.utime(path, (when, when))


def collected(space: Space, *arguments: str) -> Any:
    done = space.command("cache", "gc", *arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_what_a_lock_refers_to_stays_and_the_rest_goes(space: Space) -> None:
    found = collected(space, "--max-age", "30d")
    assert found["removed"]
    assert found["kept_bytes"] == found["left_bytes"] > 0
    for folder in ("dist", "cache/stamp.txt", "cache/memo.json"):
        subprocess.run(["rm", "-r", str(space.root / folder)], check=True)
    assert space.command("build", runner=DieRunner()).code == 0, "objects, too, are there"
    space.edit("workloads.toml", "factor = 4.0", "factor = 3.0")
    runner = FakeRunner()
    assert space.command("build", runner=runner).code == 0
    assert runner.counts["lower"] == 1, "what nothing referred to is gone"


def test_what_a_revision_refers_to_stays(space: Space) -> None:
    collected(space, "--max-age", "30d", "--max-size", "0B", "--keep-ref", "before")
    space.edit("workloads.toml", "factor = 4.0", "factor = 3.0")
    assert space.command("build", runner=DieRunner()).code == 0
    done = space.command("cache", "gc", "--keep-ref", "nonsense")
    assert done.code == ExitCode.USAGE
    assert "nonsense is no git revision with a workloads.lock" in done.err


def test_records_that_git_keeps_stay(space: Space) -> None:
    git(space, "add", "cache/record")
    removed = collected(space, "--max-age", "1s", "--max-size", "0B")["removed"]
    assert removed
    assert not [name for name in removed if name.startswith("record")]


def test_the_least_recently_used_goes_first_until_the_rest_fits(space: Space) -> None:
    everything = collected(space, "--max-size", "0B", "--dry-run")
    ages = [(space.root / "cache" / name).stat().st_mtime for name in everything["removed"]]
    assert ages == sorted(ages)
    youngest = space.root / "cache" / everything["removed"][-1]
    limit = everything["left_bytes"] + youngest.stat().st_size
    found = collected(space, "--max-size", f"{limit}B")
    assert found["removed"] == everything["removed"][:-1]
    assert found["left_bytes"] == limit
    assert youngest.exists()
    assert all(not (space.root / "cache" / name).exists() for name in found["removed"])


def test_what_was_used_lately_stays(space: Space) -> None:
    doomed = collected(space, "--max-age", "30d", "--dry-run")["removed"]
    used(space.root / "cache" / doomed[0], days_ago=1)
    assert collected(space, "--max-age", "4w")["removed"] == doomed[1:]


def test_a_dry_run_removes_nothing(space: Space) -> None:
    before = files(space)
    assert collected(space, "--max-size", "0B", "--dry-run")["removed"]
    assert files(space) == before
    assert "would remove" in space.command("cache", "gc", "--max-size", "0B", "--dry-run").out
    assert not collected(space)["removed"], "10 GB are the default"


def test_nothing_is_removed_while_a_build_is_at_work(space: Space) -> None:
    before = files(space)
    with in_use(space.root / "cache"), in_use(space.root / "cache"):
        done = space.command("cache", "gc", "--max-size", "0B")
    assert done.code == ExitCode.LOCK_HELD
    assert "a build is at work here" in done.err
    assert files(space) == before
    with unused(space.root / "cache"):
        building = space.start("build", "--locked")
        with pytest.raises(subprocess.TimeoutExpired):
            building.wait(0.2)
        building.terminate()
        building.communicate()


def test_files_of_others_stay(space: Space) -> None:
    others = [space.write({name: "mine"}).root / name for name in ("cache/blob/aa/notes", "cache/record/tune/notes.json", "cache/notes")]
    collected(space, "--max-size", "0B", "--max-age", "0s")
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("option", ["--max-size=big", "--max-size=-1GB", "--max-size=10", "--max-age=3y", "--max-age=nand"])
def test_wrong_limits_are_sentences(option: str, tmp_path: Path) -> None:
    done = Space(tmp_path).command("cache", "gc", option)
    assert done.code == ExitCode.USAGE
    assert "is not a number with a unit" in done.err


def test_an_empty_folder_has_nothing_to_remove(tmp_path: Path) -> None:
    assert collected(Space(tmp_path))["removed"] == []
    assert not (tmp_path / "cache").exists()
    assert not LocalStore(tmp_path / "cache").blobs_there()("0" * 64)
