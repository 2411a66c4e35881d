"""Transposed convolutions on wgmma compute what the rule does: kernels and strides of all kinds, epilogues, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, given, proposed
from support.wgmma_cases import CONV_PARAMS, TRANSPOSED

pytestmark = pytest.mark.gpu

POLICY = proposed("wgmma_conv2d_transpose", step=13)
LAYER: dict[str, Any] = {"n": 4, "h": 28, "w": 28, "c": 128, "f": 128, "kh": 4, "kw": 4, "stride": 2, "padding": 1, "dtype": "float16"}
PROPOSED: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"out_dtype": "float32"},
    {"n": 1, "h": 8, "w": 8, "c": 512, "f": 512},
    {"n": 37, "h": 7, "w": 7, "c": 256, "f": 256},
    {"h": 29, "w": 31},
    {"h": 56, "w": 57, "c": 24, "f": 200},
    {"kh": 2, "kw": 2, "padding": 0, "f": 64},
    {"kh": 3, "kw": 3, "extra": 1},
    {"kh": 5, "kw": 5, "stride": 3},
    {"epilogue": ["bias", "relu"]},
    {"epilogue": ["bias", "add", "relu"], "n": 3, "h": 27},
]


@pytest.mark.parametrize(
    "case",
    [
        Case.numbered(at, "conv2d_transpose", attrs, given("wgmma_conv2d_transpose", CONV_PARAMS | params))
        for at, (attrs, params) in enumerate(TRANSPOSED)
    ],
    ids=str,
)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize(
    "case", [Case.numbered(at, "conv2d_transpose", LAYER | attrs, POLICY) for at, attrs in enumerate(PROPOSED)], ids=str
)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)
