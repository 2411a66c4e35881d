"""Attention by cuDNN on a real GPU is verified as any candidate: dtypes, orders of axes, causal masks, grouped heads, logsumexp."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.spaces import Space

from kerneldecl.hardware.vendor_libraries import load_vendor_library

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not load_vendor_library("libcudnn.so.9"), reason="needs nvidia-cudnn-cu13")]
WORKLOADS = """\
edition = 1

[artifact]
name = "called"
version = "0.1.0"

[target.h200]
arch = "h200"

[defaults]
dispatch = "library"

[[workload]]
name = "attention"
rule = "attention"
batch = 2
heads = 8
kv_heads = 2
queries = 256
keys = 512
cases = [
    { head_dim = 64 },
    { head_dim = 64, causal = true, dtype = "bfloat16" },
    { head_dim = 128, causal = true, layout = "bshd", align = "start" },
    { head_dim = 96, causal = true, logsumexp = true },
]
"""


def test_cudnn_computes_what_the_rule_does(tmp_path: Path) -> None:
    space = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    assert "4 tuned" in space.run("build").stdout
    for path in space.records("tune"):
        trials = json.loads(path.read_text(encoding="utf-8"))["result"]["trials"]
        assert trials[0]["candidate"]["template"] == "library_attention"
        assert trials[0]["samples"]
