"""Owns the tests of rules that would stop the process that checks them: each is a mistake with file and line.

Knows nothing of workers.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest
from support.fakes import RULE
from support.spaces import ENTRIES, FAKES, HEAD, Space

from kerneldecl.plugins import guard
from kerneldecl.plugins.guard import Stopped, guarded

LOOP = "while True:\n    try:\n        pass\n    except Exception:\n        pass\n"


def with_rule(root: Path, text: str) -> Space:
    return Space(root).write({**FAKES, "rules/scale.py": text, "workloads.toml": HEAD + ENTRIES})


@pytest.mark.parametrize(
    ("first", "problems", "line", "reason"),
    [
        (LOOP, "()", 1, "rule scale fails to import: Stopped: it takes more than 0.5 s"),
        ("import os\nos._exit(0)\n", "()", 2, "rule scale fails to import: Stopped: it ends the process by os._exit(0)"),
        ("import sys\nsys.exit(0)\n", "()", 2, "rule scale fails to import: SystemExit: 0"),
        ("", "each for each in iter(int, 1) if each", 0, "rule scale fails: Stopped: it takes more than 0.5 s"),
        ("import os\n", "os._exit(0)", 0, "rule scale fails: Stopped: it ends the process by os._exit(0)"),
    ],
)
def test_a_rule_that_would_stop_the_check_is_a_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, problems: str, line: int, reason: str
) -> None:
    monkeypatch.setattr(guard.guarded.__wrapped__, "__defaults__", (0.5,))  # type: ignore[attr-defined]  # of a generator function
    text = RULE.format(name="Scale").replace("from __future__ import annotations\n", "")
    done = with_rule(tmp_path / "space", f"{first}{text}\n    def problems(self):\n        return tuple({problems})\n").command("check")
    assert done.code == 2, done.err
    assert f"rules/scale.py:{line or ''}" in done.err
    assert reason in done.err


def test_what_a_rule_prints_is_not_among_the_results(tmp_path: Path) -> None:
    space = with_rule(tmp_path / "space", f"{RULE.format(name='Scale')}\nprint('hello')\n")
    done = space.command("check", "--json")
    assert json.loads(done.out)["entries"] == 3
    assert "hello" in done.err


def test_nothing_of_the_guard_is_left_behind() -> None:
    before = (os._exit, signal.getsignal(signal.SIGALRM))
    with pytest.raises(Stopped, match=r"takes more than 0\.05 s"), guarded(0.05):
        sum(each for each in iter(int, 1))
    assert (os._exit, signal.getsignal(signal.SIGALRM)) == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_other_threads_are_not_guarded() -> None:
    found: list[object] = []

    def run() -> None:
        with guarded():
            found.append(os._exit)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [os._exit]
