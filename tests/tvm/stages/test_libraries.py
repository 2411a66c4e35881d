"""Owns the tests of a vendor's library as a candidate, end to end on this CPU.

Knows nothing of which is faster.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.spaces import Space

import kerneldecl
from kerneldecl.hardware.vendor_libraries import load_vendor_library

pytestmark = pytest.mark.skipif(not load_vendor_library("libscipy_openblas.so"), reason="needs scipy-openblas32")
WORKSPACE = """
edition = 1

[artifact]
name = "called"
version = "1"

[target.host]
arch = "host"

[[workload]]
name = "mm"
rule = "matmul"
m = 24
n = 32
k = 16
epilogue = ["bias", "relu"]
top_k = 2
"""


def made(folder: Path, lines: str) -> Space:
    return Space(folder).write({"workloads.toml": WORKSPACE + lines})


def tuned(space: Space) -> dict[str, Any]:
    newest = max(space.records("tune"), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(newest.read_text(encoding="utf-8"))["result"]  # type: ignore[no-any-return]


def templates(space: Space) -> list[str]:
    return [trial["candidate"]["template"] for trial in tuned(space)["trials"]]


@pytest.mark.slow
def test_a_library_alone_is_verified_recorded_linked_and_called(tmp_path: Path) -> None:
    space = made(tmp_path, 'dispatch = "library"')
    assert "1 tuned" in space.run("build").stdout
    assert templates(space) == ["library_matmul"]
    assert tuned(space)["trials"][0]["error"] is not None
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((24, 16), np.float32), rng.standard_normal((16, 32), np.float32)
    bias, out = rng.standard_normal(32, np.float32), np.empty((24, 32), np.float32)
    kerneldecl.load(space.artifact())["mm"](a, b, bias, out)
    assert np.allclose(out, np.maximum(a @ b + bias, 0), atol=1e-4)
    refused = space.run("export", "mm", code=1)
    assert "it calls a vendor's library, which has no source" in refused.stderr


def test_the_fastest_races_both_and_the_next_build_has_nothing_to_do(tmp_path: Path) -> None:
    space = made(tmp_path, 'dispatch = "fastest"')
    space.run_here("build")
    found = templates(space)
    assert found.count("library_matmul") == 1
    assert len(found) > 1
    raced = [len(trial["samples"]) for trial in tuned(space)["trials"] if trial["samples"]]
    assert len(raced) == len(found)
    assert "up to date" in space.run_here("build").stdout


@pytest.mark.slow
def test_a_version_that_is_not_there_is_an_error_alone_and_the_next_best_beside_others(tmp_path: Path) -> None:
    asked = 'policy = ["auto", { name = "library", openblas = "0.2" }]\n'
    alone = made(tmp_path / "alone", asked + 'dispatch = "library"').run("build", code=1)
    assert "this kernel was tuned with 0.2: pip install" in alone.stdout + alone.stderr
    space = made(tmp_path / "both", asked)
    space.run("build")
    assert templates(space)[0] != "library_matmul"
    assert "library_matmul" in templates(space)
