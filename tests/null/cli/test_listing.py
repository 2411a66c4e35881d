"""Owns the tests of what a complete build leaves for quick commands: it is believed as long as nothing has changed.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.spaces import FAKES, Space

from kerneldecl.cli.listing import FILE, listed
from kerneldecl.planning import meanings
from kerneldecl.planning.workspace import open_workspace


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    monkeypatch.setattr("os.fsync", lambda _: None)
    space = Space(tmp_path).write(FAKES)
    assert space.command("build", runner=FakeRunner()).code == 0
    return space


@pytest.mark.parametrize("asked", [("show",), ("show", "--json"), ("query", "s*", "tabled"), ("query", "rule:scale", "--json")])
def test_the_list_of_a_build_is_what_a_plan_tells(built: Space, asked: tuple[str, ...]) -> None:
    assert listed(built.root, ()) is not None
    quick = built.command(*asked)
    (built.root / "cache" / FILE).unlink()
    assert built.command(*asked) == quick
    assert quick.out


CHANGES: dict[str, Callable[[Space], object]] = {
    "an entry": lambda space: space.edit("workloads.toml", "n = 64", "n = 65"),
    "a comment": lambda space: space.edit("workloads.toml", "n = 64", "n = 64  # rows"),
    "a rule": lambda space: space.edit("rules/scale.py", "return x * self.factor", "return self.factor * x"),
    "a record": lambda space: space.records("tune")[0].unlink(),
    "the list": lambda space: space.write({f"cache/{FILE}": "{"}),
    "a figure of the list": lambda space: space.write(
        {f"cache/{FILE}": space.read(f"cache/{FILE}").replace('"unmeasured":false', '"unmeasured":0')}
    ),
    "nothing but the stamp": lambda space: (space.root / "cache/stamp.txt").unlink(),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_list_that_no_longer_holds_is_not_believed(built: Space, what: str) -> None:
    CHANGES[what](built)
    assert listed(built.root, ()) is None
    assert built.command("show").code == 0


def test_what_files_mean_is_kept_by_their_bytes(built: Space) -> None:
    path = built.root / "cache" / meanings.FILE
    reading = meanings.read_meanings(path)
    assert reading.known
    first = open_workspace(built.root).inputs
    path.unlink()
    second = open_workspace(built.root).inputs
    assert (first.rules, first.references, first.plugins) == (second.rules, second.references, second.plugins)
    assert first.template("unrolled") == second.template("unrolled")


def test_damaged_meanings_are_none(built: Space) -> None:
    path = built.root / "cache" / meanings.FILE
    text = path.read_text()
    for wrong in ("", "{}", text[:-1], text.replace("rule", "ruin", 1), text.partition("\n")[2]):
        assert wrong != text
        path.write_text(wrong)
        assert meanings.read_meanings(path).known == {}
