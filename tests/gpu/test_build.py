"""Owns the end-to-end test on a machine with a GPU: kernels are built, measured, linked, verified, loaded.

Knows nothing of candidates.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from support.spaces import Space

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
name = "gemm"
rule = "matmul"
m = 200
n = 300
k = 128
dtype = "float16"
"""


def test_tuned_kernels_are_measured_linked_and_right(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    space.run("build")
    for path in space.records("tune"):
        result = json.loads(path.read_text(encoding="utf-8"))["result"]
        assert result["is_measured"]
        assert result["provenance"]["gpu"] == "NVIDIA H200"
        assert set(result["conditions"]) == {"before", "steady", "after", "measured_on"}
        winner = result["trials"][0]
        assert winner["registers"] > 0
        assert 1e-7 < result["run_secs"] < 1e-3
    assert "2 entries: 2 up to date" in space.run("build").stdout
    verified = space.run("verify").stdout
    assert verified.count("ok ") == 2
    assert "2 of 2 kernels correct" in verified


def test_a_bundle_is_measured_without_a_compiler_and_linked_where_it_was_built(tmp_path: Path) -> None:
    space = Space(tmp_path / "builder").write({"workloads.toml": WORKLOADS})
    space.run("build", "--no-measure")
    assert space.read("workloads.lock").count("unmeasured = true") == 2
    (bundle,) = space.root.glob("dist/*/gpu.bundle")
    elsewhere = Space(tmp_path / "gpu").write({})
    elsewhere.root.mkdir(exist_ok=True)
    shutil.move(bundle, elsewhere.root / "a.bundle")
    # No compiler on PATH: none may be called.
    output = elsewhere.run("measure", "a.bundle", PATH=str(tmp_path), CUDA_PATH="", CUDA_HOME="").stdout
    assert "2 entries: 2 measured" in output
    shutil.copytree(elsewhere.root / "cache/record", space.root / "cache/record", dirs_exist_ok=True)
    space.run("build")
    assert "unmeasured" not in space.read("workloads.lock")
    assert "2 of 2 kernels correct" in space.run("verify").stdout
