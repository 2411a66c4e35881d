"""A declared CPU is measured elsewhere by a bundle, as a GPU is: built here without measuring, measured, and linked from the records."""

from __future__ import annotations

import json

import pytest
from support.spaces import REAL, Space

from kerneldecl.hardware import host

DECLARED = REAL["workloads.toml"].replace('arch = "host"', 'arch = "x86-64-v3"')


@pytest.mark.slow
@pytest.mark.skipif(host.detect().the_cpu.vector_bytes < 32, reason="needs a CPU with AVX2")
def test_a_cpu_is_measured_by_bundle(space: Space) -> None:
    space.write({**REAL, "workloads.toml": DECLARED})
    built = space.run("build", "--no-measure", "--jobs", "1").stdout
    assert "4 unmeasured" in built
    bundle = space.root / "dist/mini-0.1.0/host.bundle"
    assert {each["workload"]["name"] for each in json.loads((bundle / "bundle.json").read_text())["entries"]} >= {"gemm", "relu"}
    space.run("measure", str(bundle))
    assert "unmeasured" not in space.run("build", "--require-measured").stdout
