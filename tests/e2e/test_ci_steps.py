"""Owns the tests of the shell steps that CI systems call: on real repositories, with the real command; the forge's client is a stub.

Knows nothing of any CI system.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.git import git
from support.repository import REPOSITORY
from support.spaces import REAL, Space, clean_environment

CI = REPOSITORY / "ci"
CALLERS = ("action.yml", "ci/gitlab.yml", ".pre-commit-hooks.yaml")
GH = """\
#!/bin/sh
echo "$@" >> "$0.log"
case "$*" in *--paginate*) cat "$0.found" 2> /dev/null || true ;; esac
"""


def step(space: Space, name: str, folder: Path, code: int = 0, **environment: str) -> str:
    """Run a step in a repository, which must end with this code; `kerneldecl` and `gh` are those of a folder."""
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    env = {**clean_environment(), "PATH": path, "KERNELDECL_OUT": str(folder), **environment}
    done = subprocess.run([CI / name], cwd=space.root, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """Return a folder with the commands that steps call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in {"kerneldecl": f'#!/bin/sh\nexec {sys.executable} -m kerneldecl "$@"\n', "gh": GH}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def test_steps_are_shell_and_those_that_are_called_are_there() -> None:
    called = {name for file in CALLERS for name in re.findall(r"([a-z-]+\.sh)", (REPOSITORY / file).read_text(encoding="utf-8"))}
    assert called == {path.name for path in CI.glob("*.sh")}, "each step is called, and each call has its file"
    for path in CI.glob("*.sh"):
        assert os.access(path, os.X_OK), f"{path.name} can be run"
        subprocess.run(["sh", "-n", path], check=True)


def test_a_comment_is_written_once_and_edited_then(space: Space, tools: Path) -> None:
    (tools / "gate.md").write_text("| entry | verdict |\n")
    step(space, "comment.sh", tools, KERNELDECL_PULL_REQUEST="7")
    (tools / "gh.found").write_text("4711\n4712\n")
    step(space, "comment.sh", tools, KERNELDECL_PULL_REQUEST="7")
    wrote = [line for line in (tools / "gh.log").read_text().splitlines() if "--method" in line]
    assert "--method POST repos/{owner}/{repo}/issues/7/comments" in wrote[0]
    assert "--method PATCH repos/{owner}/{repo}/issues/comments/4711" in wrote[1]
    assert (tools / "comment.md").read_text() == "<!-- kerneldecl gate . -->\n| entry | verdict |\n"


@pytest.mark.slow
def test_one_machine_tunes_and_another_checks_links_and_gates(space: Space, tmp_path: Path, tools: Path) -> None:
    space.write({**REAL, "workloads.toml": REAL["workloads.toml"].replace('arch = "host"', 'arch = "x86-64-v3"')})
    step(space, "build.sh", tools, KERNELDECL_TUNE="1")
    git(space, "init", "-q")
    git(space, "add", "-A")
    git(space, "commit", "-qm", "tuned")
    subprocess.run(["git", "clone", "-q", space.root, tmp_path / "clone"], check=True)
    clone = Space(tmp_path / "clone")

    step(clone, "pre-commit.sh", tools)
    step(clone, "check.sh", tools)
    assert "tuned" not in step(clone, "build.sh", tools).splitlines()[0]
    assert clone.artifact_files()
    passed = step(clone, "gate.sh", tools, KERNELDECL_AGAINST="origin/main")
    assert "4 entries: 4 SAME" in passed
    assert "<testsuite" in (tools / "gate.xml").read_text()

    # What a pull request may do: an entry that nobody has tuned.
    clone.edit("workloads.toml", "shape = [24, 32]\ntags", "shape = [24, 48]\ntags")
    assert "relu@host" in step(clone, "check.sh", tools, code=3)
    step(clone, "build.sh", tools, code=3)
    step(clone, "pre-commit.sh", tools, code=3)
    # Or one that is gone from the lock.
    lock = clone.read("workloads.lock")
    block = next(part for part in re.split(r"(?=^\[)", lock, flags=re.MULTILINE) if "relu" in part)
    clone.write({"workloads.lock": lock.replace(block, "")})
    assert "MISSING" in step(clone, "gate.sh", tools, code=1, KERNELDECL_AGAINST="origin/main")
    # A revision from before there was a lock is nothing to compare with.
    git(clone, "rm", "-q", "--cached", "workloads.lock")
    git(clone, "commit", "-qm", "no lock")
    assert "nothing to compare with" in step(clone, "gate.sh", tools, KERNELDECL_AGAINST="HEAD")
