"""Owns the tests of `diff` and `gate`: artifacts, locks and git revisions beside each other, in every format.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from support.fakes import FakeRunner
from support.git import git
from support.slower import slow_down
from support.spaces import FAKES, Space

from kerneldecl.compare import sides
from kerneldecl.compare.sides import read_side
from kerneldecl.errors import ExitCode


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Space:
    """A workspace whose first state is committed, and tagged `before`."""
    space = Space(tmp_path_factory.mktemp("gate")).write(FAKES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        assert space.command("build", runner=FakeRunner()).code == 0
    git(space, "init", "-q")
    git(space, "add", "-A")
    git(space, "commit", "-qm", "before")
    git(space, "tag", "before")
    return space


@pytest.fixture
def space(pristine: Space, tmp_path: Path) -> Space:
    subprocess.run(["cp", "-r", str(pristine.root), str(tmp_path / "space")], check=True)
    return Space(tmp_path / "space")


def test_a_slower_entry_fails_the_gate(space: Space) -> None:
    assert space.command("gate", "--against", "before").code == ExitCode.DONE
    slow_down(space, "large@box", 1.05)
    done = space.command("gate", "--against", "before")
    assert done.code == ExitCode.FAILED
    assert done.out.splitlines()[1].split()[:2] == ["SLOWER", "large@box"]
    assert "+5.0%" in done.out
    assert done.out.splitlines()[-1] == "3 entries: 1 SLOWER, 2 SAME"
    assert space.command("gate", "--against", "before", "--budget", "6%").code == ExitCode.DONE
    assert space.command("diff", "before").code == ExitCode.DONE
    git(space, "add", "-A")
    git(space, "commit", "-qm", "after")
    assert space.command("gate", "HEAD", "--against", "before").code == ExitCode.FAILED
    assert space.command("gate", "before", "--against", "HEAD").code == ExitCode.DONE


def test_the_protocols_that_have_not_chosen_are_compared_as_well(space: Space) -> None:
    slow_down(space, "large@box", 1.05, isolated=0.8)
    row = next(line for line in space.command("diff", "before").out.splitlines() if "large@box" in line)
    assert "isolated -20.0%" in row
    entry = next(each for each in json.loads(space.command("diff", "before", "--json").out)["entries"] if each["name"] == "large@box")
    assert entry["otherwise"] == {"isolated": pytest.approx(-0.2)}
    assert (entry["after"]["timing"], entry["after"]["timings"].keys()) == ("steady", {"isolated"})


def test_formats_say_the_same(space: Space) -> None:
    slow_down(space, "large@box", 1.05)
    found = json.loads(space.command("gate", "--against", "before", "--json").out)
    assert [(entry["name"], entry["verdict"], entry["fails"]) for entry in found["entries"]] == [
        ("large@box", "SLOWER", True),
        ("small@box", "SAME", False),
        ("tabled@box", "SAME", False),
    ]
    assert found["passed"] is False
    suite = ET.fromstring(space.command("gate", "--against", "before", "--format", "junit").out.encode())
    assert (suite.get("tests"), suite.get("failures")) == ("3", "1")
    assert [case.get("name") for case in suite if len(case)] == ["large@box"]
    written = space.command("gate", "--against", "before", "--format", "markdown").out
    assert written.startswith("**kerneldecl gate: failed**, 3 entries: 1 SLOWER, 2 SAME\n\n| verdict |")
    assert "| SLOWER | large@box |" in written


def test_fewer_entries_and_unmeasured_ones_fail(space: Space) -> None:
    lock = space.read("workloads.lock")
    blocks = lock.split("\n\n")
    space.write({"fewer.lock": "\n\n".join(block for block in blocks if "large@box" not in block)})
    done = space.command("gate", "fewer.lock", "--against", "workloads.lock")
    assert done.code == ExitCode.FAILED
    assert "1 MISSING" in done.out
    time_line = next(line for line in lock.splitlines() if line.startswith("time_us"))
    space.write({"unmeasured.lock": lock.replace(time_line, "unmeasured = true", 1)})
    assert "1 UNVERIFIED" in space.command("gate", "unmeasured.lock", "--against", "before").out
    failed = "\n\n".join(
        block if "large@box" not in block else '[[entry]]\nname = "large@box"\nkey = "0"\nmissing = true' for block in blocks
    )
    space.write({"failed.lock": failed})
    assert "1 MISSING" in space.command("gate", "failed.lock", "--against", "before").out


def test_artifacts_are_compared_with_locks_and_with_each_other(space: Space, tmp_path: Path) -> None:
    artifact = str(space.artifact("box"))
    assert space.command("gate", "--against", artifact).out == "3 entries: 3 SAME\n"
    space.edit("workloads.toml", "factor = 3.0", "factor = 4.0")
    space.edit("workloads.toml", 'version = "1.0"', 'version = "2.0"')
    assert space.command("build", runner=FakeRunner()).code == 0
    done = space.command("diff", "dist/fakes-1.0/box", "dist/fakes-2.0/box")
    row = next(line for line in done.out.splitlines() if "large@box" in line)
    assert "computation" in row
    assert "1 SAME" not in done.out
    del tmp_path


@pytest.mark.parametrize(
    ("named", "code"),
    [("nowhere", ExitCode.USAGE), ("--help\n", ExitCode.USAGE), ("table.txt", ExitCode.INTEGRITY), ("rules", ExitCode.INTEGRITY)],
)
def test_what_is_no_state_is_a_sentence(named: str, code: ExitCode, space: Space) -> None:
    done = space.command("gate", f"--against={named}")
    assert done.code == code
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


HOSTILE: dict[str, Callable[[str], str]] = {
    "a key that leads out": lambda lock: lock.replace('key = "', 'key = "../../', 1),
    "a time that is text": lambda lock: lock.replace("time_us = ", 'time_us = "soon" # ', 1),
    "a name of control characters": lambda lock: lock.replace('"large@box"', '"\\u001b[2Jlarge\\u0000"'),
    "a name that is no text": lambda lock: lock.replace('"large@box"', "5"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_lock_is_data(name: str, space: Space) -> None:
    space.write({"hostile.lock": HOSTILE[name](space.read("workloads.lock"))})
    for form in ("table", "junit", "markdown"):
        done = space.command("gate", "hostile.lock", "--against", "before", "--format", form)
        assert done.code in {ExitCode.FAILED, ExitCode.INTEGRITY, ExitCode.DONE}
        assert all(character.isprintable() or character == "\n" for character in done.out + done.err)


def test_shares_are_checked(space: Space) -> None:
    for wrong in ("lots", "-1%", "100%"):
        assert space.command("gate", "--against", "before", f"--budget={wrong}").code == ExitCode.USAGE


def test_of_what_is_known_no_record_is_read(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(space, "small@box", 1.5)
    known, asked = read_side(space.root, "workloads.lock"), []

    def committed(_root: Path, _revision: str, keys: Sequence[str]) -> Mapping[str, object]:
        asked.extend(keys)
        return {}

    monkeypatch.setattr(sides, "_committed", committed)
    found = read_side(space.root, "before", known)
    assert asked == [known["small@box"].key], "it has another time"
    assert [name for name in found if found[name] is known[name]] == ["large@box", "tabled@box"]
    assert found["small@box"].run_secs == pytest.approx((known["small@box"].run_secs or 0.0) / 1.5, rel=1e-3)
