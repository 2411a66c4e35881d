"""Owns the tests of the commands that follow: plans at every save, and a build that is at work elsewhere.

Knows nothing of how plans are made.
"""

from __future__ import annotations

import json
import os
import signal
import time
from subprocess import Popen

import pytest
from support.spaces import FAKES, Space

SECS = 60.0


def read_until(process: Popen[str], words: str) -> str:
    """Return what a process prints up to a line with these words."""
    assert process.stdout is not None
    said, until = "", time.monotonic() + SECS
    while time.monotonic() < until and (line := process.stdout.readline()):
        said += line
        if words in line:
            return said
    raise AssertionError(f"no {words!r} in {said!r}")


def test_every_save_of_a_source_is_planned(space: Space) -> None:
    pytest.importorskip("watchfiles", reason="the extra watch is not installed")
    space.write(FAKES)
    with space.start("watch", "small", "large") as process:
        try:
            assert "2 entries: 0 up to date" in read_until(process, "2 entries")
            time.sleep(1.0)  # the kernel is asked for changes once the first plan is printed
            space.write({"notes.txt": "no source"})
            space.edit("workloads.toml", "factor = 3.0", "factor = 4.0")
            read_until(process, "2 entries")
            space.write({"workloads.toml": "edition = 1\n["})
            time.sleep(2.0)
            space.write({"workloads.toml": FAKES["workloads.toml"]})
            assert "2 entries: 0 up to date" in read_until(process, "2 entries"), "a mistake does not end it"
        finally:
            os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=SECS)
    assert process.returncode == 0
    assert "saved: workloads.toml" in said
    assert "notes.txt" not in said


def test_a_build_is_followed_by_its_events(space: Space) -> None:
    assert "no build has run here" in space.run("top", "--once", code=10).stderr
    lines = [
        {"event": "log", "at": time.time() - 5, "schema": 1},
        {"event": "started", "at": time.time() - 4, "entries": 2, "lower": 0, "tune": 2, "build": 0},
        {"event": "begun", "at": time.time() - 3, "entry": "a@box", "computation": "c"},
    ]
    followed = space.root / "elsewhere.jsonl"
    followed.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"event": "st')
    told = space.run_json("top", "--events", str(followed))
    assert (told["entries"], told["done"], told["ended"], [each["entry"] for each in told["in_flight"]]) == (2, 0, None, ["a@box"])
    assert space.run("top", "--events", str(followed)).stdout.startswith("2 entries to tune: 0 done, 1 in flight; ")
