"""Owns the test that real builds share a cache: workers, compiler and linker are real.

Knows nothing of servers: the cache is a folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.spaces import REAL, Space


@pytest.mark.slow
def test_a_second_machine_compiles_and_measures_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    table = f'\n[cache]\nurl = "file://{tmp_path}/cache"\nmode = "read-write"\n'
    text = REAL["workloads.toml"].replace("\n[defaults]", f"{table}\n[defaults]")
    spaces = [Space(tmp_path / name) for name in ("first", "second", "third")]
    for space in spaces:
        space.root.mkdir()
        space.write({**REAL, "workloads.toml": text})
    first = spaces[0].run_json("build")
    assert first["tuned"] == 4
    second = spaces[1].run_json("build")
    assert (second["tuned"], second["built"], second["up_to_date"]) == (0, 0, 4)
    assert not any(count for kind, count in second["ran"].items() if kind != "link")
    assert spaces[1].artifact_files() == spaces[0].artifact_files()
    # A policy with a candidate less makes other lists: their objects and measurements are known.
    spaces[2].edit("policies/plain.py", "CHOICES = (0, 1)", "CHOICES = (1,)")
    third = spaces[2].run_json("build")
    assert third["tuned"] == 4
    assert third["ran"]["measured"] == third["ran"]["verified"] == 0
    assert len(spaces[2].records("build")) == 4
