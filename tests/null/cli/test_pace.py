"""Owns the tests of what `plan` expects a build to take, by what earlier ones took.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.spaces import FAKES, Space

from kerneldecl.cli.pace import FILE, Pace, read_paces, write_paces


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    monkeypatch.setattr("os.fsync", lambda _: None)
    return Space(tmp_path).write(FAKES)


def test_a_plan_expects_what_earlier_builds_took(space: Space) -> None:
    assert "this machine" not in space.command("plan").out, "no build has tuned anything"
    assert space.command("build", runner=FakeRunner()).code == 0
    (pace,) = read_paces(space.root / "cache").values()
    assert (pace.entries, pace.candidates) == (3, 9)
    write_paces(space.root / "cache", {"box": Pace(18.0, 3, 9)})
    assert "this machine" not in space.command("plan").out, "nothing is to be tuned"
    space.edit("workloads.toml", "n = 64", "n = 65")
    assert "box: 3 candidates at most, about 6 s on this machine" in space.command("plan").out
    (row,) = json.loads(space.command("plan", "--json").out)["expected"]
    assert (row["target"], row["entries"], row["candidates"], row["secs"]) == ("box", 1, 3, 6.0)


@pytest.mark.parametrize("content", ["", "{", '{"schema": 1, "targets": {"box": [1]}}', '{"schema": 1, "targets": {"box": [1, 0, "x"]}}'])
def test_a_damaged_file_costs_the_estimate_alone(space: Space, content: str) -> None:
    space.write({f"cache/{FILE}": content})
    assert read_paces(space.root / "cache") == {}
    assert space.command("plan").code == 0
