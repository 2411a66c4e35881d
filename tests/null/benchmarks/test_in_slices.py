"""Owns the tests of commands that run in slices of time.

Knows nothing of benchmarks.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from support.repository import REPOSITORY


def run_slice(listed: str, folder: Path, secs: float) -> tuple[int, str]:
    (folder / "list.toml").write_text(listed, encoding="utf-8")
    command = [sys.executable, str(REPOSITORY / "benchmarks" / "in_slices.py"), str(folder / "list.toml")]
    found = subprocess.run(
        [*command, "--state", str(folder / "state"), "--secs", str(secs)], capture_output=True, text=True, check=False, timeout=60
    )
    assert not found.stderr
    return found.returncode, found.stdout


def command(name: str, run: str, secs: float, more: str = "") -> str:
    return f"[[command]]\nname = '{name}'\nrun = '''{run}'''\nsecs = {secs}\n{more}\n"


def runs(pid: int) -> bool:
    """Say whether a process runs: one that was killed stays listed until whoever has inherited it asks."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_what_has_ended_is_not_run_again(tmp_path: Path) -> None:
    listed = command("counts", f"echo x >> {tmp_path}/runs", 1) + command("fails", "exit 7", 1)
    code, text = run_slice(listed, tmp_path, 20)
    assert code == 1
    assert "exit code 7" in text.splitlines()[-1]
    assert run_slice(listed, tmp_path, 20)[0] == 1
    assert (tmp_path / "runs").read_text() == "x\n"


def test_a_command_is_begun_only_where_its_time_is_left(tmp_path: Path) -> None:
    listed = command("long", "echo long", 100) + command("short", "echo short", 1)
    code, text = run_slice(listed, tmp_path, 10)
    assert code == 3
    assert [line.split()[0] for line in text.splitlines()[-2:]] == ["left", "done"]
    assert run_slice(listed, tmp_path, 200)[0] == 0
    assert "long" in (tmp_path / "state" / "long.txt").read_text()


def test_what_resumes_goes_on_in_the_next_slice(tmp_path: Path) -> None:
    step = "echo x >> {state}/steps; test $(wc -l < {state}/steps) -ge 2 || sleep 60"
    listed = command("resumes", step, 30, "resumes = true")
    begun = time.monotonic()
    assert run_slice(listed, tmp_path, 2)[0] == 3
    assert time.monotonic() - begun < 30
    assert run_slice(listed, tmp_path, 20)[0] == 0
    assert (tmp_path / "state" / "resumes" / "steps").read_text() == "x\nx\n"


def test_a_slice_leaves_no_process(tmp_path: Path) -> None:
    listed = command("hangs", f"trap '' INT; sleep 300 & echo $! > {tmp_path}/child; wait", 1)
    code, text = run_slice(listed, tmp_path, 20)
    assert code == 1
    assert "too slow" in text
    assert not runs(int((tmp_path / "child").read_text()))
