"""Owns the test of the whole way on a machine with a GPU: built, measured, linked, verified, loaded.

Knows nothing of which candidates there are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from spaces import REPOSITORY, Space

pytestmark = pytest.mark.gpu

WORKLOADS = """\
edition = 1

[artifact]
name = "mini"
version = "0.1.0"

[target.gpu]
arch = "h200"

[defaults]
top_k = 3

[[workload]]
name = "add"
rule = "elementwise"
op = "add"
shape = [300, 1000]
dtype = "float16"

[[workload]]
name = "product"
rule = "matmul"
m = 200
n = 300
k = 128
dtype = "float16"
"""


def run(space: Space, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH", ""))))
    return space.run(*arguments, PYTHONPATH=path).stdout


def test_what_is_tuned_here_is_measured_linked_and_right(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    run(space, "build")
    for path in space.records("tune"):
        result = json.loads(path.read_text(encoding="utf-8"))["result"]
        assert result["is_measured"]
        assert result["provenance"]["gpu"] == "NVIDIA H200"
        assert set(result["conditions"]) == {"before", "after"}
        winner = result["measurements"][0]
        assert winner["registers"] > 0
        assert 1e-7 < result["run_secs"] < 1e-3
    assert "2 entries: 2 up to date" in run(space, "build")
    verified = run(space, "verify")
    assert verified.count("ok ") == 2
    assert "2 of 2 kernels right" in verified
