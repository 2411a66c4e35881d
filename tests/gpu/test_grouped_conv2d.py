"""Convolutions in groups on mma.sync and CUDA cores compute what the rule does: dtypes, group sizes, odd images, strides, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, given, proposed
from support.grouped_conv_cases import CONVOLUTIONS, PARAMS, PLAIN, SIMT_CONVOLUTIONS, SIMT_PARAMS

pytestmark = pytest.mark.gpu

SMALL = [
    Case(name, "conv2d", PLAIN | attrs, given("gpu_grouped_conv2d", PARAMS | params)) for name, (attrs, params) in CONVOLUTIONS.items()
]
SMALL += [
    Case(name, "conv2d", PLAIN | attrs, given("gpu_grouped_conv2d_simt", SIMT_PARAMS | params))
    for name, (attrs, params) in SIMT_CONVOLUTIONS.items()
]
SHAPES: list[dict[str, Any]] = [
    {"n": 32, "h": 28, "w": 28, "c": 256, "f": 256, "groups": 32, "epilogue": ("bias", "relu")},
    {"n": 4, "h": 56, "w": 56, "c": 128, "f": 128, "groups": 32, "epilogue": ("bias", "relu")},
    {"n": 4, "h": 57, "w": 55, "c": 256, "f": 256, "groups": 32, "stride": 2, "dtype": "bfloat16"},
    {"n": 8, "h": 14, "w": 14, "c": 1024, "f": 1024, "groups": 32, "epilogue": ("add",)},
    {"n": 8, "h": 14, "w": 14, "c": 512, "f": 512, "groups": 8, "stride": 2},
    {"n": 3, "h": 31, "w": 33, "c": 144, "f": 144, "groups": 6, "kh": 5, "kw": 5, "padding": 2},
    {"n": 2, "h": 28, "w": 28, "c": 240, "f": 480, "groups": 3, "kh": 1, "kw": 1, "padding": 0},
    {"n": 1, "h": 28, "w": 28, "c": 64, "f": 64, "groups": 32},
    {"n": 8, "h": 28, "w": 28, "c": 256, "f": 256, "groups": 32, "dtype": "float32", "epilogue": ("bias", "relu", "add")},
    {"n": 4, "h": 57, "w": 55, "c": 116, "f": 116, "groups": 116, "stride": 2, "epilogue": ("bias",)},
    {"n": 4, "h": 28, "w": 28, "c": 240, "f": 240, "groups": 240, "kh": 5, "kw": 5, "padding": 2, "dtype": "bfloat16"},
    {"n": 2, "h": 19, "w": 21, "c": 60, "f": 100, "groups": 20},
]
PROPOSED = [Case(str(attrs), "conv2d", PLAIN | attrs, proposed("gpu_grouped_conv2d", step=5)) for attrs in SHAPES]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", PROPOSED, ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)
