"""Owns the tests of what an extraction says of fallbacks before anything is tuned.

Knows nothing of how a model is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.spaces import REAL, Space

from kerneldecl.compiler import actions
from kerneldecl.extract.edit_toml import Function
from kerneldecl.extract.expected_fallbacks import expected_fallbacks

RELU_BYTES, GEMM_BYTES = 2 * 4 * 8 * 16, 3 * 4 * 16 * 16
RELU_OPERATIONS, GEMM_OPERATIONS = 8 * 16, 2 * 16**3
ENTRIES = """
[[workload]]
name = "relu"
rule = "elementwise"
op = "relu"
shape = [8, 16]
policy = "cpu_fallback"
tags = ["net", "net.calls-2", "other", "other.calls-1"]

[[workload]]
name = "gemm"
rule = "matmul"
m = 16
n = 16
k = 16
policy = "auto"
tags = ["net", "net.calls-3"]

[[workload]]
name = "nobodys"
rule = "elementwise"
op = "relu"
shape = [8, 16]
policy = "cpu_fallback"
"""


RELU = ("elementwise", (("op", "relu"), ("shape", (8, 16))))
GEMM = ("matmul", (("k", 16), ("m", 16), ("n", 16)))


@pytest.fixture
def space(tmp_path: Path) -> Space:
    head = REAL["workloads.toml"].split("[[workload]]")[0]
    files = {name: text for name, text in REAL.items() if name != "workloads.toml"}
    return Space(tmp_path).write({**files, "workloads.toml": head + ENTRIES})


@pytest.fixture(scope="module")
def functions() -> dict[Function, Any]:
    """Return what an extraction finds of the two functions."""
    found = {}
    for rule, attrs in (RELU, GEMM):
        lowered = actions.lower(".", rule, dict(attrs))
        work = {"flops": lowered["flops"], "bytes": lowered["least_bytes"]}
        found[Function(rule, rule, attrs, attrs, 1)] = {"work": work, "space": lowered["space"]}
    return found


def test_entries_that_only_the_fallback_takes_are_named_with_their_share(space: Space, functions: dict[Function, Any]) -> None:
    (found,) = expected_fallbacks(space.root, "net", functions)
    assert (found["target"], found["model"], found["entries"], found["fallbacks"]) == ("host", "net", 2, ["relu"])
    assert found["operations"] == pytest.approx(2 * RELU_OPERATIONS / (2 * RELU_OPERATIONS + 3 * GEMM_OPERATIONS))
    assert found["bytes"] == pytest.approx(2 * RELU_BYTES / (2 * RELU_BYTES + 3 * GEMM_BYTES))


def test_a_model_of_fallbacks_alone_is_all_fallback(space: Space, functions: dict[Function, Any]) -> None:
    (found,) = expected_fallbacks(space.root, "other", functions)
    assert (found["entries"], found["operations"], found["bytes"]) == (1, 1.0, 1.0)


def test_a_model_without_fallbacks_has_nothing_to_say(space: Space, functions: dict[Function, Any]) -> None:
    space.edit("workloads.toml", 'tags = ["net", "net.calls-2", "other", "other.calls-1"]', "")
    assert expected_fallbacks(space.root, "net", functions) == []
