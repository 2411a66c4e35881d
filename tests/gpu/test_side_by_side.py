"""Owns the test of a machine with several GPUs of one model: they measure at the same time.

Knows nothing of how entries are handed out.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.gpu_additions import H200
from support.spaces import Space

from kerneldecl.hardware.gpu_lock import gpus_of, why_not_here

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(why_not_here(H200.model)) or len(gpus_of(H200.model)) < 2, reason=f"needs two {H200.model} in one machine"),
]

WORKLOADS = """\
edition = 1

[artifact]
name = "rows"
version = "0.1.0"

[target.gpu]
arch = "h200"

[defaults]
top_k = 4

[[workload]]
name = "sum"
rule = "reduce"
op = "sum"
shape = [[4096, 1024], [8192, 1024], [16384, 1024], [4096, 4096], [8192, 4096], [16384, 4096]]
axes = [1]
dtype = "float16"
"""


def test_each_gpu_measures_some_of_the_entries(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    space.run("build")
    results = [json.loads(path.read_text(encoding="utf-8"))["result"] for path in space.records("tune")]
    assert len(results) == 6
    used = {result["conditions"]["measured_on"]["gpu"] for result in results}
    assert len(used) == 2, "two entries or more wait whenever one GPU is idle"
    assert used <= {gpu.short_uuid for gpu in gpus_of(H200.model)}
