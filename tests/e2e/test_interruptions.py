"""Owns the tests of builds that are interrupted, killed or run side by side: nothing finished is lost, nothing is left behind.

Knows nothing of what is built, except that there are four computations.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import kills
from support.repository import REPOSITORY
from support.spaces import REAL, Space, clean_environment
from support.thinned import at

COMPUTATIONS = 4
INTERRUPTED = (130, -signal.SIGINT)
"""Python ends by the signal itself where that arrived while it ran code given as a string, as dataclasses do; a shell says 130."""


@pytest.fixture
def fresh(space: Space) -> Iterator[Space]:
    """Return a workspace with nothing built; whatever the test leaves running there ends."""
    yield space.write(REAL)
    for process in processes_in(space):
        process.kill()


def processes_in(space: Space) -> list[psutil.Process]:
    """Return every process that works in the workspace's folder: workers inherit it."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(space.root):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def vanished(space: Space) -> bool:
    return not psutil.wait_procs(processes_in(space), timeout=10)[1]


def until_line(process: subprocess.Popen[str], word: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if word in line:
            return
    raise AssertionError(f"the build ended without a line with {word}")


def has_worked(process: subprocess.Popen[str], secs: float) -> None:
    """Wait until a process has had so much processor time, which on a busy machine comes later."""
    while sum(psutil.Process(process.pid).cpu_times()[:2]) < secs:
        time.sleep(0.005)


def has_workers(process: subprocess.Popen[str]) -> None:
    while not psutil.Process(process.pid).children():
        time.sleep(0.005)


def processes_per_core() -> float:
    """Return how many processes there are for each core, at least 1: what takes two seconds takes that many times as long."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def interrupted(space: Space, process: subprocess.Popen[str]) -> None:
    start, crowd = time.monotonic(), processes_per_core()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20 * crowd)
    assert time.monotonic() - start < 2 * crowd
    assert process.returncode in INTERRUPTED
    assert "interrupted: finished work is kept" in err
    assert "Traceback" not in err
    assert processes_in(space) == []


@pytest.mark.parametrize("secs", at({1}, [0.1, 0.15, 0.2, 0.3]))
def test_an_interrupt_of_a_build_that_has_hardly_begun_says_nothing_odd(fresh: Space, secs: float) -> None:
    with fresh.start("build") as process:
        has_worked(process, secs)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode in INTERRUPTED
    assert "Traceback" not in err
    assert processes_in(fresh) == []


def test_an_interrupt_that_an_import_makes_another_error_of_is_still_an_interrupt(fresh: Space) -> None:
    turned = "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(9)\nexcept KeyboardInterrupt:\n    raise ImportError('half')\n"
    fresh.write({"rules/matmul.py": f"import os, signal, time\n{turned}"})
    found = fresh.run("build", code=130)
    assert "interrupted: finished work is kept" in found.stderr
    assert "half" not in found.stderr


@pytest.mark.parametrize("secs", at({1}, [0.0, 0.5, 1.5]))
def test_an_interrupt_ends_a_build_within_two_seconds(fresh: Space, secs: float) -> None:
    with fresh.start("build") as process:
        has_workers(process)
        time.sleep(secs)
        assert process.poll() is None
        interrupted(fresh, process)


def test_after_an_interrupt_the_next_build_goes_on(fresh: Space) -> None:
    with fresh.start("build") as process:
        until_line(process, "tuned [1/")
        interrupted(fresh, process)
    kept = {path: path.read_bytes() for path in fresh.records("tune")}
    assert 1 <= len(kept) < COMPUTATIONS
    done = fresh.run("build")
    assert f"{COMPUTATIONS - len(kept)} tuned, {len(kept)} up to date in " in done.stdout or "built" in done.stdout
    assert sum(line.startswith("tuned [") for line in done.stderr.splitlines()) == COMPUTATIONS - len(kept)
    assert all(path.read_bytes() == content for path, content in kept.items())


@pytest.mark.slow
def test_an_interrupt_ends_a_build_whose_worker_hangs(fresh: Space) -> None:
    """In code that never gives the interpreter back."""
    fresh.edit("templates/plain.py", "    sch = ", "    while True:\n        pass\n    sch = ")
    with fresh.start("build", "-v") as process:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(fresh.records("lower")) < COMPUTATIONS:
            time.sleep(0.1)
        time.sleep(1.0)
        interrupted(fresh, process)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 30])
def test_builds_that_are_killed_lose_nothing_and_leave_nothing(tmp_path: Path, count: int) -> None:
    """Whole or a worker of theirs, at random moments. `python -m support.kills` does so as often as one likes."""
    trial = kills.new_trial(tmp_path)
    kills.kill_builds(trial, count, random.Random(20))
    assert trial.wrong == []


@pytest.mark.slow
def test_many_builds_at_once_share_the_work_and_leave_nothing(tmp_path: Path) -> None:
    trial = kills.new_trial(tmp_path)
    kills.build_at_once(trial, 2, random.Random(20))
    assert trial.wrong == []


@pytest.mark.slow
def test_an_edit_during_a_build_belongs_to_the_next_one(tmp_path: Path) -> None:
    trial = kills.new_trial(tmp_path)
    kills.edit_builds(trial, 3, random.Random(20), tmp_path)
    assert trial.wrong == []


@pytest.mark.slow
def test_two_builds_at_once_share_the_work(fresh: Space) -> None:
    first, second = fresh.start("build"), fresh.start("build")
    (_, first_err), (_, second_err) = first.communicate(timeout=120), second.communicate(timeout=120)
    assert (first.returncode, second.returncode) == (0, 0), first_err + second_err
    lines = (first_err + second_err).splitlines()
    assert sum(line.startswith("tuned [") for line in lines) == COMPUTATIONS
    assert len(fresh.records("tune")) == COMPUTATIONS
    pids = {str(first.pid), str(second.pid)}
    waits = [line for line in lines if "is tuning in this workspace: waiting for it to finish" in line]
    assert waits
    assert {line.split()[1] for line in waits} <= pids
    assert fresh.run("build").stdout == "4 entries: 4 up to date\n"
    fresh.run("verify")


@pytest.mark.slow
def test_a_build_that_must_not_wait_says_who_is_at_work(fresh: Space) -> None:
    with fresh.start("build", "-v") as first:
        until_line(first, "built")
        second = fresh.run("build", "--no-wait", code=9)
        assert f"process {first.pid} on " in second.stderr
        first.communicate(timeout=120)
    assert first.returncode == 0


@pytest.mark.slow
def test_records_of_a_declared_arch_travel_and_are_locked(fresh: Space, tmp_path: Path) -> None:
    """What one machine has measured, another one links: without blobs, without tuning, and with --locked."""
    fresh.edit("workloads.toml", 'arch = "host"', 'arch = "x86-64-v3"')
    fresh.run("build")
    assert not (fresh.root / "cache/local/tune").exists()
    clone = fresh.copy_of(tmp_path / "clone", "cache/record", "workloads.lock")
    done = clone.run("build", "--locked")
    assert "tuned" not in done.stderr
    assert clone.artifact_files() == fresh.artifact_files()
    clone.edit("workloads.toml", "m = 16", "m = 17")
    stale = clone.run("build", "--locked", code=3)
    assert "workloads.lock would change: gemm@host would be tuned" in stale.stderr
    assert json.loads((clone.artifact() / "manifest.json").read_text())["arch"]["name"] == "x86-64-v3"


@pytest.mark.slow
def test_the_first_build_of_an_installation_without_bytecode_goes_through(fresh: Space, tmp_path: Path) -> None:
    """It makes the bytecode of what it imports, beside modules that it watches for edits."""
    installed = tmp_path / "installed"
    for folder in ("kerneldecl", "rules"):
        shutil.copytree(REPOSITORY / folder, installed / folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment = {**clean_environment(), "PYTHONPATH": str(installed)}
    del environment["PYTHONDONTWRITEBYTECODE"]
    command = [sys.executable, "-m", "kerneldecl", "build", "relu"]
    done = subprocess.run(command, cwd=fresh.root, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(installed.rglob("*.pyc"))
