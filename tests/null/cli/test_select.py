"""Owns the tests of patterns that ask for more than names, and of builds with other settings than the declared ones.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.spaces import FAKES, Space


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Space:
    monkeypatch.setattr("os.fsync", lambda _: None)
    return Space(tmp_path).write(FAKES)


def entries(space: Space, *patterns: str) -> list[str]:
    done = space.command("query", "--json", *patterns)
    assert done.code == 0, done.err
    return [entry["entry"] for entry in json.loads(done.out)["entries"]]


def test_entries_are_selected_by_their_state(space: Space) -> None:
    everything = ["small@box", "large@box", "tabled@box"]
    assert entries(space, "stale:") == entries(space, "unmeasured:") == everything
    assert entries(space, "failed:") == []
    assert space.command("build", runner=FakeRunner()).code == 0
    assert entries(space, "stale:") == entries(space, "unmeasured:") == []
    space.edit("workloads.toml", "n = 64", "n = 65")
    assert entries(space, "stale:") == ["large@box"]
    assert entries(space, "stale:small") == []
    assert space.command("query", "stale:").out.splitlines()[1].split() == ["large@box", "-", "not", "tuned"]
    assert "no entry is in that state" in space.command("query", "stale:small").out
    wrong = space.command("query", "stale:smal")
    assert (wrong.code, wrong.err) == (4, 'error: no entry matches "smal"; did you mean "small"?\n')


def test_a_failed_entry_is_selected_until_it_is_mended(space: Space) -> None:
    space.edit("templates/unrolled.py", 'times"', "times\" + ' wrong' * ('* 3.0' in mod)")
    assert space.command("build", runner=FakeRunner()).code == 1
    assert entries(space, "failed:") == ["large@box"]
    assert "failed: none of " in space.command("query", "failed:").out
    space.edit("templates/unrolled.py", " + ' wrong' * ('* 3.0' in mod)", "")
    assert space.command("build", "failed:", "stale:", runner=FakeRunner()).code == 0
    assert entries(space, "failed:") == []


def test_patterns_ask_for_policies_archs_and_take_entries_out(space: Space) -> None:
    assert entries(space, "arch:test-cpu") == entries(space, "policy:plain") == entries(space, "*")
    assert entries(space, "*", "--", "-small", "-rule:lookup") == ["large@box"]
    assert entries(space, "--", "-large") == ["small@box", "tabled@box"]
    assert space.command("query", "arch:test-gpu").err == 'error: no entry matches "arch:test-gpu"; did you mean "arch:test-cpu"?\n'
    assert "follows `--`" in space.command("query", "-small").err


def test_a_try_changes_nothing_that_is_declared(space: Space) -> None:
    assert space.command("build", runner=FakeRunner()).code == 0
    kept = {name: space.read(name) for name in ("workloads.lock", "cache/state.json", "cache/stamp.txt")}
    artifact = space.artifact_files()
    done = space.command("build", "-D", "top_k=1", runner=FakeRunner())
    assert "3 entries: 3 tuned in " in done.out
    assert "a try, of which nothing is linked or locked" in done.out
    assert {name: space.read(name) for name in kept} == kept
    assert space.artifact_files() == artifact
    assert len(json.loads(space.command("show", "-D", "top_k=1", "small", "--json").out)["candidates"]) == 1
    assert len(json.loads(space.command("show", "small", "--json").out)["candidates"]) == 3
    assert "3 up to date" in space.command("plan", "-D", "top_k=1").out
    assert space.command("plan", "-D", "top_k=2").out.count("-D") == 0
    assert "0 up to date" in space.command("plan", "-D", "top_k=2").out


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("top_q=3", 'unknown key "top_q"; expected one of policy, budget, top_k, tolerance, timing, dispatch; did you mean "top_k"?'),
        ("n=3", "a rule's attribute makes another entry: declare that in workloads.toml"),
        ("top_k", "'top_k' is no KEY=VALUE; write -D top_k=3"),
        ("top_k=0", "top_k is 0; expected an integer above 0"),
        ("policy=plian", 'did you mean "plain"?'),
        ("budget={ trails = 3 }", 'unknown key "trails" of budget'),
        ("policy=[", "neither a name nor a TOML value"),
        ("timing=cold", 'timing is "cold"'),
    ],
)
def test_a_wrong_override_is_one_sentence(space: Space, given: str, said: str) -> None:
    done = space.command("build", "-D", given)
    assert done.code == 2
    assert done.err.startswith("error: -D: ")
    assert said in done.err
    assert done.err.count("\n") == 1
