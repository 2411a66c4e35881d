"""Owns the tests that extreme mistakes are one sentence each, with place and way out, and never an internal error."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.spaces import FAKES, Space

Edit = Callable[[Space], object]


def entry(line: str) -> Edit:
    """Add a line to the last entry."""
    return lambda space: space.write({"workloads.toml": f"{space.read('workloads.toml')}{line}\n"})


def instead(old: str, new: str) -> Edit:
    return lambda space: space.edit("workloads.toml", old, new)


MISTAKES: Mapping[str, tuple[Edit, str, str]] = {
    "a huge integer": (entry("top_k = " + "9" * 5000), "workloads.toml:30: ", "more than 4300 digits"),
    "nested lists": (entry("top_k = " + "[" * 480 + "]" * 480), "workloads.toml:30: ", "nested too deeply"),
    "nested tables": (entry("top_k = " + "{a=" * 480 + "1" + "}" * 480), "workloads.toml:30: ", "nested too deeply"),
    "a key of many parts": (entry("a." * 2000 + "b = 1"), "workloads.toml:30: ", "nested too deeply"),
    "a target of dots": (instead("target.box", 'target.".."'), "workloads.toml:7: ", 'target is named ".."'),
    "a target of a dot": (instead("target.box", 'target."."'), "workloads.toml:7: ", 'target is named "."'),
    "a hidden target": (instead("target.box", 'target.".box"'), "workloads.toml:7: ", "without a dot in front"),
    "a target that is a bundle's": (instead("target.box", 'target."box.bundle"'), "workloads.toml:7: ", ".bundle at the end"),
    "a long target": (instead("target.box", f"target.{'t' * 300}"), "workloads.toml:7: ", "at most 100"),
    "a long artifact": (instead('"fakes"', f'"{"a" * 300}"'), "workloads.toml:4: ", "at most 100"),
    "a long version": (instead('"1.0"', f'"{"1" * 300}"'), "workloads.toml:5: ", "at most 64 characters"),
    "a long path": (entry(f'specialize = "{"d/" * 8000}x.py"'), "workloads.toml:30: tabled: ", "at most 1024 characters"),
    "an endless sweep": (instead("n = 64", f"n = {list(range(1, 100_002))}"), "workloads.toml:19: large: ", "at most 100000"),
    "control characters in a name": (
        instead('"small"', '"\\u001b]0;owned\\u0007\\nno mistakes"'),
        "workloads.toml:15: ",
        "name is",
    ),
    "control characters in a value": (entry('policy = "\\u001b[2J"'), "workloads.toml:30: ", "policy is"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_an_extreme_mistake_is_a_sentence_with_its_place(fakes: Space, name: str) -> None:
    edit, place, words = MISTAKES[name]
    edit(fakes)
    for command in ("check", "plan", "build"):
        done = fakes.command(command)
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith(f"error: {place}")
        assert words in done.err.splitlines()[0]
        assert all(character.isprintable() or character == "\n" for character in done.err)
        assert len(done.err) < 1000


def test_a_workspace_whose_path_is_not_utf8_is_built_and_null_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    root = tmp_path / os.fsdecode(b"\xff\xfe")
    space = Space(root).write(FAKES)
    assert space.command("build", runner=FakeRunner()).code == 0
    assert space.command("build").out == "3 entries: 3 up to date\n"
    assert space.command("plan").code == space.command("show").code == 0


def test_a_file_that_cannot_be_written_is_named(fakes: Space) -> None:
    (fakes.root / "cache").mkdir()
    (fakes.root / "cache/record").write_text("in the way")
    done = fakes.command("build", runner=FakeRunner())
    assert done.code == 10
    assert done.err.startswith("error: ")
    assert "cache/record" in done.err
    assert "is a file; a folder belongs there: move away what is there" in done.err


def test_a_full_disk_is_told_with_the_file_that_it_has_no_room_for(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write to a disk on which nothing can be kept: what fails is a write to an open file, which Python does not name."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    done = fakes.command("build", runner=FakeRunner())
    assert (done.code, done.out) == (10, "")
    assert done.err.startswith(f"error: {fakes.root}/cache/")
    assert done.err.endswith(" cannot be read or written: No space left on device\n")
    assert not list(fakes.root.rglob("*.part"))
    monkeypatch.undo()
    assert fakes.command("build", runner=FakeRunner()).code == 0


def test_an_internal_error_is_told_where_no_file_can_be_written(fakes: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("kerneldecl.cli.commands.Settings", wrong)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    done = fakes.command("check")
    assert done.code == 5
    assert done.err.startswith("Traceback")
    assert "error: internal error: ZeroDivisionError: a bug; the traceback is above, as no file could be written: " in done.err


def test_a_plugin_that_fails_is_blamed_with_file_and_line(fakes: Space) -> None:
    fakes.edit("rules/scale.py", "return x * self.factor", "return x * factor")
    fakes.edit("rules/scale.py", "    factor: float = 2.0", "    factor: float = two")
    done = fakes.command("check")
    assert done.code == 2
    assert done.err.startswith("error: rules/scale.py:10: small: rule scale fails to import: NameError: name 'two' is not defined")
