"""Owns the tests of workloads.lock: its text, what is in it, and what it says of changes in a review.

Knows nothing of how records came about.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli
from support.fakes import ARCH, FakeRunner
from support.spaces import Space

from kerneldecl import api
from kerneldecl.hardware.arch_file import read_arch
from kerneldecl.model import Candidate, Workload
from kerneldecl.planning.lockfile import lock_text, locked_entries, times_of, unmeasured_keys, unsettled_keys
from kerneldecl.store.results import TuneResult

TOOLCHAIN = {"tvm_ffi": "2", "tvm": "1"}


def record(name: str, run_secs: float) -> TuneResult:
    winner = {"template": "cpu_matmul", "params": {"tile": [4, 16], "parallel": True, "unroll": []}}
    blobs = {"object": f"object of {name}", "database": "", "source": ""}
    return TuneResult(f"key of {name}", {"winner": winner, "is_measured": True, "error": 0.0, "run_secs": run_secs, **blobs})


def entries(*names: str, is_detected: bool = False) -> list[tuple[Workload, object, TuneResult]]:
    import dataclasses

    arch = dataclasses.replace(read_arch("test-cpu", ARCH.encode(), ""), is_detected=is_detected)
    made = [(Workload(name, "box", "matmul", (), "auto", 4, None, (), 1), arch) for name in names]
    return [(workload, arch, record(workload.name, 1.23456e-4 * (i + 1))) for i, (workload, arch) in enumerate(made)]


def test_the_lock_has_the_published_text(golden: Callable[[str, str], None]) -> None:
    golden("lock", lock_text(("ops", "0.1.0"), TOOLCHAIN, entries("b[m=16]", "a")))  # type: ignore[arg-type]


def test_the_lock_tells_what_is_wanting() -> None:
    ((workload, arch, whole),) = entries("a")
    partly = TuneResult("k", {**whole.json, "measured": 2, "wanted": 3, "error": None})
    text = lock_text(("ops", "0.1.0"), TOOLCHAIN, [(workload, arch, partly)])  # type: ignore[list-item]
    (entry,) = tomli.loads(text)["entry"]
    assert (entry["measured"], entry["unverified"]) == ("2 of 3", True)
    assert unsettled_keys(text) == {"k"}
    assert unsettled_keys(lock_text(("ops", "0.1.0"), TOOLCHAIN, [(workload, arch, whole)])) == set()  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("mark", "is_unmeasured", "is_unsettled"),
    [
        ("unmeasured = true", True, True),
        ('measured = "2 of 3"', True, True),
        ("unverified = true", True, True),
        ("missing = true", False, True),
        ("unmeasured = false", False, False),
        ("time_us = 1.0", False, False),
    ],
)
def test_what_a_lock_holds_in_want_of_measurements_or_as_missing(mark: str, is_unmeasured: bool, is_unsettled: bool) -> None:
    text = f'[[entry]]\nname = "a"\nkey = "k"\n{mark}\n\n[[entry]]\nname = "b"\nkey = "l"\n'
    assert unmeasured_keys(text) == ({"k"} if is_unmeasured else set())
    assert unsettled_keys(text) == ({"k"} if is_unsettled else set())


@pytest.mark.parametrize("text", ["", "nonsense", "entry = 1", "entry = [1]", "[[entry]]\nmissing = true\n", "[" * 100_000])
def test_what_is_no_lock_holds_nothing(text: str) -> None:
    assert unmeasured_keys(text) == unsettled_keys(text) == frozenset()


def test_the_lock_is_sorted_and_toml() -> None:
    text = lock_text(("ops", "0.1.0"), TOOLCHAIN, entries("c", "a", "b"))  # type: ignore[arg-type]
    assert text == lock_text(("ops", "0.1.0"), TOOLCHAIN, sorted(entries("c", "a", "b"), key=lambda entry: entry[0].name))  # type: ignore[arg-type]
    parsed = tomli.loads(text)
    assert [entry["name"] for entry in parsed["entry"]] == ["a@box", "b@box", "c@box"]
    assert parsed["artifact"] == {"name": "ops", "version": "0.1.0"}
    assert parsed["toolchain"] == {"tvm": "1", "tvm_ffi": "2"}


def test_entries_of_a_detected_arch_are_left_out() -> None:
    host = lock_text(("ops", "0.1.0"), TOOLCHAIN, entries("a", is_detected=True))  # type: ignore[arg-type]
    assert host == lock_text(("ops", "0.1.0"), TOOLCHAIN, [])


def test_candidates_are_shown_in_one_line() -> None:
    assert (
        str(Candidate.of("t", {"tile": (4, 16), "deep": True, "unroll": (), "order": "ijk"}))
        == "t(deep=true order=ijk tile=4x16 unroll=none)"
    )


def test_a_build_locks_declared_archs_and_keeps_their_records_for_git(fakes: Space) -> None:
    fakes.edit("workloads.toml", "[defaults]", '[target.host]\narch = "host"\n\n[defaults]')
    fakes.build()
    locked = tomli.loads(fakes.read("workloads.lock"))["entry"]
    assert {entry["name"] for entry in locked} == {"small@box", "large@box", "tabled@box"}
    declared = {path.stem for path in fakes.root.glob("cache/record/tune/*.json")}
    assert {entry["key"] for entry in locked} == declared
    assert len(list(fakes.root.glob("cache/local/tune/*.json"))) == 3


def test_one_changed_entry_is_one_changed_block(fakes: Space) -> None:
    fakes.build()
    before = fakes.read("workloads.lock").splitlines()
    fakes.edit("workloads.toml", "n = 64", "n = 65")
    fakes.build()
    changed = [line for line in difflib.ndiff(before, fakes.read("workloads.lock").splitlines()) if line[0] in "+-"]
    block = {"key", "winner", "time_us", "object"}
    assert {line[2:].partition(" = ")[0] for line in changed} <= block
    assert {"key", "object"} <= {line[2:].partition(" = ")[0] for line in changed if line[0] == "+"}


@pytest.mark.parametrize("options", [{"require_all": True}, {"keep_going": False}])
def test_a_failed_build_that_links_nothing_leaves_the_lock_as_it_was(fakes: Space, options: dict[str, bool]) -> None:
    fakes.build()
    before = fakes.read("workloads.lock")
    fakes.edit("workloads.toml", "factor = 3.0", "factor = 0.0")
    assert fakes.build(**options).build.failures
    assert fakes.read("workloads.lock") == before


def test_the_lock_marks_entries_that_the_artifact_lacks(fakes: Space) -> None:
    fakes.edit("workloads.toml", "factor = 3.0", "factor = 0.0")
    (failed,) = [action.key for action in fakes.plan().actions if (action.entry, action.kind) == ("large@box", "lower")]
    fakes.build()
    locked = {entry.pop("name"): entry for entry in tomli.loads(fakes.read("workloads.lock"))["entry"]}
    assert locked["large@box"] == {"key": failed, "missing": True}
    assert "winner" in locked["small@box"]
    assert "winner" in locked["tabled@box"]


def test_check_stale_tells_of_a_lock_that_was_not_committed(fakes: Space) -> None:
    fakes.command("build", runner=FakeRunner())
    assert fakes.command("check", "--stale").code == 0
    fakes.edit("workloads.lock", "small@box", "small@vox")
    stale = fakes.command("check", "--stale")
    assert stale.code == 3
    assert "workloads.lock is out of date" in stale.err


def test_check_stale_asks_what_a_build_would_and_keeps_none_of_it(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes.command("build", runner=FakeRunner())
    fakes.edit("workloads.toml", "n = 64", "n = 65")
    runner, before = FakeRunner(), {path: path.read_bytes() for path in fakes.records("*")}
    monkeypatch.setattr(api, "LocalRunner", lambda *_, **__: contextlib.nullcontext(runner))
    for _ in range(2):
        stale = fakes.command("check", "--stale")
        assert stale.code == 3
        assert "large@box" in stale.out
        assert {path: path.read_bytes() for path in fakes.records("*")} == before
    assert set(runner.counts) == {"lower", "propose"}


@pytest.mark.parametrize("edit", ["workloads.lock", "workloads.toml"])
def test_a_locked_command_is_not_taken_in_by_an_earlier_build(fakes: Space, edit: str) -> None:
    """The quick way to "nothing to do" must not skip the lock."""
    fakes.command("build", runner=FakeRunner())
    assert fakes.command("build", "--locked").code == 0
    if edit == "workloads.lock":
        fakes.edit(edit, "small@box", "small@vox")
    else:
        fakes.edit(edit, '"small"', '"tiny"')
    assert fakes.command("build", "--locked").code == 3
    assert fakes.command("build", runner=FakeRunner()).code == 0
    assert fakes.command("build", "--locked").code == 0
    assert "tiny@box" in fakes.read("workloads.lock") or edit == "workloads.lock"


def test_locked_without_a_lock_is_stale(fakes: Space) -> None:
    done = fakes.command("build", "--locked")
    assert done.code == 3
    assert not Path(fakes.root / "dist").exists()


def test_times_are_read_without_toml() -> None:
    text = lock_text(("a", "1"), TOOLCHAIN, entries("one[n=8]", "two", "three"))  # type: ignore[arg-type]  # stands for an Arch
    marked = text.replace("time_us = 246.9", 'time_us = 246.9\nmeasured = "2 of 3"').replace("time_us = 370.4", "unmeasured = true")
    parsed = locked_entries(marked)
    assert parsed is not None
    assert times_of(marked) == {each["name"]: each["time_us"] * 1e-6 for each in parsed if "time_us" in each}
    assert set(times_of(marked)) == {"one[n=8]@box", "two@box"}
    assert times_of("time_us = 1\n[[entry]]\nname = 1") == {}
