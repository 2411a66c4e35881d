"""Fragments of the changelog go into the newest release, each below the heading of its kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support.repository import REPOSITORY

CHANGELOG = """# Changelog

## 0.2.0 - unreleased

Invalidates: nothing.

### Added

- An old thing.

### Fixed

- A fault.

## 0.1.0 - 2026-01-01

### Added

- The first thing.
"""


@pytest.fixture(scope="module")
def assemble() -> Any:
    spec = importlib.util.spec_from_file_location("assemble", REPOSITORY / "changes/assemble.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "changes").mkdir()
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG, encoding="utf-8")
    return tmp_path


def test_fragments_stand_in_the_newest_release_below_their_kind(assemble: Any, root: Path) -> None:
    (root / "changes/one.added.md").write_text("A new\nthing.\n", encoding="utf-8")
    (root / "changes/two.removed.md").write_text("A thing that nobody used.", encoding="utf-8")
    (root / "changes/README.md").write_text("How.", encoding="utf-8")
    assert assemble.main(root) == 0
    newest, older = (root / "CHANGELOG.md").read_text(encoding="utf-8").split("## 0.1.0")
    sections = newest.split("### ")
    assert [section.splitlines()[0] for section in sections[1:]] == ["Added", "Removed", "Fixed"]
    assert sections[1].splitlines()[2:4] == ["- An old thing.", "- A new thing."]
    assert "Invalidates: nothing." in sections[0]
    assert "## 0.1.0" + older == CHANGELOG[CHANGELOG.index("## 0.1.0") :]
    assert [path.name for path in (root / "changes").iterdir()] == ["README.md"]
    assert assemble.main(root) == 0, "nothing to move is no mistake"


@pytest.mark.parametrize("name", ["thing.md", "thing.new.md", "a thing.added.md"])
def test_a_file_that_is_no_fragment_changes_nothing(assemble: Any, root: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "changes" / name).write_text("What?", encoding="utf-8")
    assert assemble.main(root) == 2
    assert "expected NAME.KIND.md" in capsys.readouterr().err
    assert (root / "CHANGELOG.md").read_text(encoding="utf-8") == CHANGELOG


def test_fragments_that_wait_are_ones(assemble: Any) -> None:
    assemble.fragments(REPOSITORY / "changes")
