"""Owns the tests of what a build's events say of it while it is at work.

Knows nothing of files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kerneldecl.cli.event_log import Tail
from kerneldecl.cli.top import running_text
from kerneldecl.cli.watch import sources
from kerneldecl.report.running import running

RAN = {"event": "ran", "request": "build tiled", "process": "compile 7", "computation": "", "failure": ""}
LINES: list[dict[str, Any]] = [
    {"event": "log", "at": 100.0, "schema": 1},
    {"event": "started", "at": 100.5, "entries": 5, "lower": 0, "tune": 4, "build": 0},
    {"event": "begun", "at": 101.0, "entry": "a@box", "computation": "c1"},
    {"event": "begun", "at": 101.0, "entry": "b@box", "computation": "c2"},
    {**RAN, "at": 112.0, "began": 102.0, "secs": 10.0},
    {"event": "step", "at": 113.0, "entry": "b@box", "doing": "verified", "done": 3, "total": 20, "best_secs": 2e-6},
    {**RAN, "at": 118.0, "began": 116.0, "secs": 2.0, "failure": "no"},
    {"event": "finished", "at": 119.0, "entry": "a@box", "kind": "tune", "text": "tiled() 1 us", "has_failed": False},
]


def test_a_build_at_work_tells_what_is_in_flight_and_what_is_left() -> None:
    state = running(LINES, now=120.0)
    assert (state.secs, state.entries, state.done, state.failed, state.ended) == (20.0, 4, 1, 0, None)
    assert [(each.entry, each.secs, each.doing, each.done, each.best_secs) for each in state.in_flight] == [
        ("b@box", 19.0, "verified", 3, 2e-6)
    ]
    (process,) = state.processes
    assert (process.requests, process.failed, process.busy) == (2, 1, pytest.approx(0.4)), "of the ten seconds from 110 on"
    assert state.left_secs == pytest.approx(60.0)
    text = running_text(state)
    assert text.startswith("4 entries to tune: 1 done, 1 in flight; 20.0 s so far, about 60.0 s left")
    assert "verified 3 of 20" in text


def test_a_build_that_has_ended_is_at_no_entry_any_more() -> None:
    state = running([*LINES, {"event": "ended", "at": 121.0, "secs": 21.0, "failure": "KeyboardInterrupt: "}], now=900.0)
    assert (state.secs, state.in_flight, state.left_secs) == (21.0, (), None)
    assert "ended after 21.0 s by KeyboardInterrupt" in running_text(state)


def test_a_log_that_has_only_begun_is_a_state() -> None:
    state = running(LINES[:1], now=100.0)
    assert (state.entries, state.in_flight, state.processes, state.left_secs) == (0, (), (), None)
    assert running_text(state).startswith("0 entries to tune")


def test_sources_are_what_a_plan_reads() -> None:
    root = Path("/space")
    changed = ["workloads.toml", "rules/x.py", "shared.py", "data/table.txt", "cache/record/x.json", "dist/x.py", "workloads.lock", "w.log"]
    found = sources(root, [*(root / name for name in changed), Path("/other/x.py"), root], 'table = "data/table.txt"')
    assert found == ["data/table.txt", "rules/x.py", "shared.py", "workloads.toml"]


def test_a_log_is_followed_line_by_line_and_anew_where_another_build_begins(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first, second, third = (f"{json.dumps(line)}\n" for line in LINES[:3])
    tail = Tail(path)
    path.write_text(first + second[:10])
    assert tail.read() == LINES[:1], "half a line is none yet"
    path.write_text(first + second + third)
    assert tail.read() == LINES[:3]
    assert tail.read() == LINES[:3]
    other = {**LINES[0], "at": 900.0}
    path.write_text(f"{json.dumps(other)}\n" + second * 20)
    assert tail.read() == [other, *LINES[1:2] * 20]
