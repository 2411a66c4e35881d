"""Owns the tests of edits during a build: they belong to the next one, whatever is edited and when.

Knows nothing of how the snapshot is taken.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fakes import FakeRunner
from support.spaces import FAKES, Space

from kerneldecl import api
from kerneldecl.errors import StaleError
from kerneldecl.null_build import stamp
from kerneldecl.planning.snapshot import snapshot
from kerneldecl.tuning.events import Event

OWN = """\
from ._words import WORD


def specialize(mod, arch):
    return f'{mod} {WORD}'


def unused():
    import near.more
"""
FILES = {
    "own/small.py": OWN,
    "own/_words.py": "WORD = 'by hand'\n",
    "near/more.py": "MORE = 1\n\n\ndef unused():\n    import own.small\n",
    "rules/_factors.py": "ONE = 1\n",
    "rules/scale.py": "from ._factors import ONE\n" + FAKES["rules/scale.py"].replace("{self.factor}", "{ONE * self.factor}"),
}
EDITS: Mapping[str, tuple[str, str, str]] = {
    "rule": ("rules/scale.py", "X[i] * {", "X[i] + {"),
    "what a rule imports": ("rules/_factors.py", "ONE = 1", "ONE = 7"),
    "policy": ("policies/plain.py", "(1, 2, 4, 8)", "(16, 2, 32)"),
    "template": ("templates/unrolled.py", "times", "fold"),
    "arch": ("archs/test-cpu.toml", '"x86-64-v2"', '"x86-64-v3"'),
    "file of an attribute": ("table.txt", "1 2 3", "1 2 4"),
    "custom kernel": ("own/small.py", "{mod}", "{mod} slow"),
    "what a custom kernel imports": ("own/_words.py", "by hand", "with care"),
    "declarations": ("workloads.toml", "n = 64", "n = 65"),
}


class Interrupting(FakeRunner):
    """Calls a function once, right before the request of a kind is answered that many others of it have preceded."""

    def __init__(self, kind: str, after: int, edit: Callable[[], None]) -> None:
        super().__init__()
        self._kind, self._after, self._edit = kind, after, edit

    def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["action"] == self._kind:
            self._after -= 1
            if self._after == -1:
                self._edit()
        return super()._answer(request)


@pytest.fixture
def edited(fakes: Space) -> Space:
    fakes.write(FILES)
    fakes.edit("workloads.toml", 'name = "small"\n', 'name = "small"\nspecialize = "own/small.py"\n')
    return fakes


MOMENTS = [("lower", 1), ("build", 4), ("describe", 2)]
"""Kind of a request, and how many others of it come before: one moment in each stage."""
CASES = [
    (what, *moment, place % 2 == 0 and (place + turn) % len(MOMENTS) == 0)
    for place, what in enumerate(EDITS)
    for turn, moment in enumerate(MOMENTS)
]


@pytest.mark.parametrize(
    ("what", "kind", "after"), [pytest.param(*case, marks=[] if is_quick else pytest.mark.slow) for *case, is_quick in CASES]
)
def test_an_edit_during_a_build_belongs_to_the_next_one(edited: Space, tmp_path: Path, what: str, kind: str, after: int) -> None:
    before = edited.copy_of(tmp_path / "before", "own", "near")
    runner = Interrupting(kind, after, lambda: edited.edit(*EDITS[what]))
    assert edited.command("build", runner=runner).code == 0
    after_edit = edited.copy_of(tmp_path / "after", "own", "near")
    for clean in (before, after_edit):
        assert clean.command("build", runner=FakeRunner()).code == 0
    assert without_dates(edited) == without_dates(before), "the first build is of what it began with"
    assert edited.command("build", runner=FakeRunner()).code == 0
    assert without_dates(edited) == without_dates(after_edit), "the second one is of the edited files"
    assert edited.command("build").out == "3 entries: 3 up to date\n"


@pytest.mark.parametrize("what", ["rule", "policy", "template"])
def test_an_edit_that_is_taken_back_during_the_build_was_never_there(edited: Space, tmp_path: Path, what: str) -> None:
    name, old, new = EDITS[what]
    clean = edited.copy_of(tmp_path / "clean", "own", "near")

    class Twice(FakeRunner):
        def _answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
            if sum(asked["action"] == "verify" for asked in self.asked) == 3 and old in edited.read(name):
                edited.edit(name, old, new)
            if request["action"] == "describe" and new in edited.read(name):
                edited.edit(name, new, old)
            return super()._answer(request)

    for space, runner in ((edited, Twice()), (clean, FakeRunner())):
        assert space.command("build", runner=runner).code == 0
    assert without_dates(edited) == without_dates(clean)
    assert edited.command("build").out == "3 entries: 3 up to date\n"


def without_dates(space: Space) -> dict[str, Any]:
    """Return every file of the artifacts, manifests without what tells of time and machine."""
    files: dict[str, Any] = {name: digest for name, digest in space.artifact_files().items() if not name.endswith("manifest.json")}
    for path in space.root.glob("dist/*/*/manifest.json"):
        manifest = space.json(str(path.relative_to(space.root)))
        for entry in manifest["entries"]:
            del entry["provenance"]
        files["manifest"] = {name: value for name, value in manifest.items() if name != "digest"}
    return files


@pytest.mark.parametrize("kind", ["lower", "describe"])
def test_results_of_a_kerneldecl_that_changes_meanwhile_are_not_kept(fakes: Space, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    runner = Interrupting(kind, 2, lambda: monkeypatch.setattr(stamp, "surroundings", lambda: "others"))
    events: list[Event] = []
    with api.frozen_workspace(fakes.root) as workspace, pytest.raises(StaleError, match="changed while this build ran"):
        api.run_build(workspace, (), api.Options(), events.append, runners=lambda: Entered(runner))
    assert len(fakes.records("lower")) == (0 if kind == "lower" else 3)
    assert len(fakes.records("tune")) == (0 if kind == "lower" else 2)


class Entered:
    """Gives a runner as a context manager."""

    def __init__(self, runner: FakeRunner) -> None:
        self._runner = runner

    def __enter__(self) -> FakeRunner:
        return self._runner

    def __exit__(self, *_: object) -> None:
        pass


def test_the_snapshot_is_of_what_a_build_reads_and_of_nothing_else(edited: Space) -> None:
    edited.write({"notes.txt": "", "own/_unused.py": "", "elsewhere/large.bin": "", "rules/__pycache__/x.pyc": ""})
    with snapshot(edited.root) as sources:
        found = {str(path.relative_to(sources)) for path in sources.rglob("*") if path.is_file()}
    assert found == {*FAKES, *FILES}
    assert not sources.exists()


def test_no_snapshot_is_of_what_lies_outside(fakes: Space) -> None:
    outside = fakes.root.parent / f"{uuid.uuid4()}.txt"
    outside.write_text("secret")
    names = [f"../{outside.name}", str(outside), "a\0b", "a" * 300]
    fakes.edit("workloads.toml", 'name = "small"\n', f'name = "small"\ntags = {json.dumps(names)}\n')
    before = outside.stat().st_mtime_ns
    with snapshot(fakes.root) as sources:
        assert (sources / "table.txt").is_file()
        assert not (sources.parent / outside.name).exists()
        assert outside.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"table.txt"', '"tabel.txt"', "table.txt"),  # the nearest file's name is a hint
        ('"table.txt"', "[" * 5000 + "]" * 5000, "nested"),
        ('"table.txt"', "1" * 5000, "digits"),
    ],
    ids=["name", "nest", "number"],
)
def test_a_mistake_is_told_as_without_a_snapshot(fakes: Space, old: str, new: str, says: str) -> None:
    fakes.edit("workloads.toml", old, new)
    checked, built = fakes.command("check"), fakes.command("build")
    assert (built.code, built.err) == (checked.code, checked.err)
    assert says in built.err


def test_a_folder_without_declarations_is_its_own_snapshot(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    with snapshot(tmp_path) as sources:
        assert sources == tmp_path
    assert (tmp_path / "rules").is_dir()
