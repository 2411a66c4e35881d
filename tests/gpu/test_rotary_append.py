"""Owns the test of a KV cache that a GPU's kernel appends to in place.

Knows nothing of how the kernels are made.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.spaces import Space

import kerneldecl
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_rule

pytestmark = pytest.mark.gpu

WORKLOADS = """\
edition = 1

[artifact]
name = "cache"
version = "0.1.0"

[target.gpu]
arch = "h200"

[defaults]
top_k = 4

[[workload]]
name = "append"
rule = "rotary_append"
batch = 3
tokens = 5
heads = 2
size = 64
keys = 96

[[workload]]
name = "paged"
rule = "rotary_append"
batch = 3
tokens = 5
heads = 2
size = 24
keys = 64
page_size = 8
pages = 30
layout = "bshd"
interleaved = true
pairs = true
"""


def test_a_cache_is_appended_to_in_place(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    space = Space(tmp_path).write({"workloads.toml": WORKLOADS})
    space.run("build")
    kernels = kerneldecl.load(space.artifact("gpu"))
    for name in ("append", "paged"):
        kernel = kernels[name]
        rule = load_rule(STANDARD, "rotary_append").of(STANDARD, kernel.attrs)
        given = rule.inputs(np.random.default_rng(2))
        held = [torch.from_numpy(array).cuda() for array in given]
        assert kernel(*held) is None
        caches = [tensor.cpu().numpy() for tensor in held[-2:]]
        for cache, want, before in zip(caches, rule.reference(*given), given[-2:], strict=True):
            np.testing.assert_allclose(cache.astype("float32"), want, rtol=1e-2, atol=1e-2)
            assert (cache != before).any(axis=-1).sum() <= 3 * 5 * 2
