"""Convolutions on wgmma compute what the rule does: strides, margins, dilations, few channels, epilogues, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, given, proposed
from support.wgmma_cases import CONV_PARAMS, CONVOLUTIONS

pytestmark = pytest.mark.gpu

POLICY = proposed("wgmma_conv2d", step=13)
LAYER: dict[str, Any] = {"n": 4, "h": 28, "w": 28, "c": 128, "f": 128, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}
PROPOSED: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"out_dtype": "float32"},
    {"n": 1},
    {"n": 37, "h": 7, "w": 7, "c": 256, "f": 256},
    {"h": 29, "w": 31},
    {"h": 56, "w": 57, "c": 24, "f": 200},
    {"c": 8, "f": 8},
    {"c": 72, "f": 40, "n": 9},
    {"stride": 2},
    {"stride": 3, "padding": 0},
    {"kh": 1, "kw": 1, "padding": 0, "stride": 2, "c": 256, "f": 512},
    {"kh": 7, "kw": 7, "padding": 3, "stride": 2, "c": 8, "f": 64},
    {"kh": 5, "kw": 3, "padding": 2},
    {"dilation": 2, "padding": 2},
    {"dilation": 3, "padding": 4, "stride": 2},
    {"padding": 0},
    {"padding": 3},
    {"epilogue": ["bias", "relu"]},
    {"epilogue": ["bias", "add", "relu"], "stride": 2, "n": 3, "h": 27},
    {"epilogue": ["bias", "silu"], "f": 72},
    {"epilogue": ["gelu"], "dtype": "bfloat16", "h": 14, "w": 14},
    {"c": 55, "f": 937, "h": 25, "w": 25, "dtype": "bfloat16"},
    {"c": 43, "f": 71, "n": 1, "stride": 2, "epilogue": ["bias", "relu"]},
    {"f": 3, "epilogue": ["bias"]},
]


@pytest.mark.parametrize(
    "case",
    [Case.numbered(at, "conv2d", attrs, given("wgmma_conv2d", CONV_PARAMS | params)) for at, (attrs, params) in enumerate(CONVOLUTIONS)],
    ids=str,
)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", [Case.numbered(at, "conv2d", LAYER | attrs, POLICY) for at, attrs in enumerate(PROPOSED)], ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)
