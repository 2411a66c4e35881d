"""Owns the tests of benchmarks that need neither a GPU nor torch, as they are run: whole processes, few and small entries.

Knows nothing of their figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.repository import REPOSITORY

pytestmark = pytest.mark.slow
SMALL = ("--arch", "host", "--seed", "4", "--top-k", "2", "--jobs", "2")


def ran(name: str, *given: str, results: Path) -> Any:
    command = [sys.executable, str(REPOSITORY / "benchmarks" / name), *SMALL, *given, "--json", str(results)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return json.loads(results.read_text(encoding="utf-8"))


def test_two_tunings_of_the_same_entries_are_compared_in_parts(tmp_path: Path) -> None:
    given = ("--random", "3", "--only", "s4_*", "--count", "1", "--state", str(tmp_path / "state"))
    assert ran("repeat.py", *given, results=tmp_path / "one.json")["summary"]["entries"] == 1
    found = ran("repeat.py", *given, "--from", "1", results=tmp_path / "two.json")
    assert found["summary"]["entries"] == len({row["entry"] for row in found["entries"]}) == 2
    assert all(row["verdict"] in {"same", "tied", "other"} for row in found["entries"])


def test_every_request_of_a_tuning_is_noted(tmp_path: Path) -> None:
    found = ran("tuning_time.py", "--count", "1", "--rules", "softmax", results=tmp_path / "time.json")
    assert (found["tuned"], found["failures"]) == (1, {})
    asked = [span["action"] for span in found["spans"]]
    assert asked.count("prepare") == 1
    assert asked.count("build") >= 1
    assert asked.count("verify") >= 1
    assert all(span["begin"] <= span["end"] for span in found["spans"])
