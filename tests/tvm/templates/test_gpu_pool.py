"""Pooling by columns of pixels: right results on the emulated GPU, no spills, None and no proposal for other functions."""

from __future__ import annotations

from typing import Any

import pytest
from support.compilers import needs_nvcc
from support.emulated_kernel import error
from support.repository import REPOSITORY

from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.rule import Rule
from kerneldecl.templates import gpu_pool as template

H200 = load_arch(REPOSITORY, "h200")
SMALL: dict[str, Any] = {"op": "max", "n": 2, "h": 13, "w": 11, "c": 16, "kh": 3, "kw": 3, "stride": 2, "padding": 1, "dtype": "float16"}
PARAMS: dict[str, Value] = {"threads": 64, "width": 8, "column": 3, "strip": 1, "ahead": 3}
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({}, {}),
    ({"op": "mean"}, {"strip": 2, "ahead": 1}),
    ({"op": "mean", "count_padding": False, "dtype": "bfloat16"}, {"column": 4, "ahead": 9}),
    ({"dtype": "bfloat16", "stride": 1}, {"column": 4, "strip": 2}),
    ({"dtype": "float32", "kh": 5, "kw": 5, "padding": 2}, {"width": 4, "column": 2, "ahead": 4}),
    ({"kh": 2, "kw": 2, "padding": 0, "c": 24}, {"column": 4, "width": 4}),
    ({"op": "mean", "dtype": "float32", "kh": 2, "kw": 2, "padding": 1, "stride": 1}, {"width": 2, "column": 5, "strip": 3, "ahead": 2}),
    ({"kh": 3, "kw": 2, "padding": 0, "stride": 3, "c": 6}, {"width": 2, "column": 1}),
]


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "pool2d").of(REPOSITORY, attrs)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), CASES, ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert error(template, rule_of(**SMALL | attrs), PARAMS | params, H200) <= 1
