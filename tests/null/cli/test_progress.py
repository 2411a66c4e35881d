"""Owns the tests of a build's displays, of the table that it ends with, and of its counters.

Knows nothing of TVM: workspaces are built with fakes.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from support.fakes import FakeRunner
from support.repository import REPOSITORY
from support.spaces import FAKES, Space

from kerneldecl.cli.winners import winners_text
from kerneldecl.planning.workspace import open_workspace
from kerneldecl.plugins.find import PACKAGE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_build_on_a_terminal_shows_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    space, terminal = Space(tmp_path).write(FAKES), Terminal()
    monkeypatch.setattr("contextlib.redirect_stderr", lambda _: monkeypatch.context())
    monkeypatch.setattr(sys, "stderr", terminal)
    assert space.command("build", runner=FakeRunner()).code == 0
    shown = terminal.getvalue()
    assert "internal error" not in shown
    for entry in ("small@box", "large@box", "tabled@box"):
        assert f"tuned\x1b[0m {entry}: unrolled(" in shown
    assert "timed 3 of 3" in shown


def test_a_build_ends_with_its_winners_and_one_line(tmp_path: Path) -> None:
    space = Space(tmp_path).write(FAKES)
    first = space.command("build", runner=FakeRunner()).out.splitlines()
    assert first[0].split() == ["entry", "time", "of", "roofline", "winner"]
    assert [line.split()[0] for line in first[1:4]] == ["small@box", "large@box", "tabled@box"]
    assert first[-1].startswith("3 entries: 3 tuned in ")
    assert first[-1].endswith('/dist/fakes-1.0/box") in Python')
    again = space.command("build", "--retune", "small", runner=FakeRunner()).out.splitlines()
    assert again[-1].startswith("3 entries: 1 tuned, 2 up to date in ")
    assert [line.split()[0] for line in again[:2]] == ["entry", "small@box"]


def test_a_time_before_is_told_with_what_became_of_it() -> None:
    winner = {"entry": "gemm@host", "winner": "cpu_dot(n=1)", "run_secs": 2e-5, "measured": True, "roofline_share": 0.5, "tied": 0}
    faster = {"run_secs": 4e-5, "change": -0.5, "verdict": "FASTER"}
    same = {"run_secs": 2e-5, "change": 0.001, "verdict": "SAME"}
    lines = winners_text([{**winner, "before": faster, "default": same}, {**winner, "before": None, "default": None}], 0)
    assert "before" in lines[0]
    assert "40.0 us, 2.00x faster" in lines[1]
    assert "20.0 us, same" in lines[1]
    assert max(map(len, winners_text([{**winner, "before": faster, "default": same}], 80))) <= 80
    assert "before" not in winners_text([{**winner, "before": None, "default": None}], 0)[0], "a column without a figure is left out"


def test_a_checkout_follows_no_file_of_the_package_itself() -> None:
    """The package's listing stands for them: a snapshot of the workspace has no copy, and no build would be null."""
    followed = open_workspace(REPOSITORY).extra_files
    assert followed
    assert not any(file.is_relative_to(PACKAGE) for file in followed)
