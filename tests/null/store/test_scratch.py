"""Owns the tests of the user's own folders: who may have them, and what becomes of what a killed process left there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kerneldecl.errors import ToolchainError
from kerneldecl.store.lock import exclusive
from kerneldecl.store.scratch import runtime_folder, scratch_folder, temporary_folder

HOLDER = """
import sys
from kerneldecl.store.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "large.o").write_bytes(b"content")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide a temporary folder, a home and no runtime folder."""
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    folder = temporary_folder()
    assert folder == tmp_path / "tmp" / f"kerneldecl-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert runtime_folder() == folder


def test_locks_lie_in_the_runtime_folder_where_that_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "run"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(given))
    assert runtime_folder() == temporary_folder(), "it is not there"
    given.mkdir()
    given.chmod(0o777)
    assert runtime_folder() == temporary_folder(), "others can write there"
    given.chmod(0o700)
    assert runtime_folder() == given / "kerneldecl"


@pytest.mark.parametrize("taken", ["link", "file", "open to others"])
def test_who_takes_the_folders_name_first_blocks_nobody_and_gets_nothing(tmp_path: Path, taken: str) -> None:
    place, elsewhere = tmp_path / "tmp" / f"kerneldecl-{os.getuid()}", tmp_path / "elsewhere"
    elsewhere.mkdir()
    if taken == "link":
        place.symlink_to(elsewhere)
    elif taken == "file":
        place.write_text("x")
    else:
        place.mkdir()
        place.chmod(0o777)
    with scratch_folder() as folder:
        assert folder.parent == tmp_path / "home" / ".cache" / "kerneldecl"
    assert list(elsewhere.iterdir()) == []


def test_what_killed_processes_left_is_removed_by_the_next_and_nothing_else() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in "ab"]
    left, kept = (Path(process.stdout.readline().strip()) for process in processes if process.stdout)
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    assert left.is_dir()
    with scratch_folder() as own:
        assert not left.exists()
        assert (kept / "large.o").is_file(), "its process is alive"
        assert own.is_dir()
    processes[1].communicate("")
    assert list(temporary_folder().iterdir()) == []
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            if pipe:
                pipe.close()


def test_a_link_in_the_place_of_a_lock_or_of_its_holder_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "x.holder").symlink_to(victim)
    with exclusive(tmp_path / "x.lock", "working", print):
        assert f"process {os.getpid()}" in (tmp_path / "x.holder").read_text()
    assert victim.read_text() == "mine"
    (tmp_path / "y.lock").symlink_to(victim)
    with pytest.raises(ToolchainError, match="is a symbolic link"), exclusive(tmp_path / "y.lock", "working", print):
        pass
    assert victim.read_text() == "mine"
