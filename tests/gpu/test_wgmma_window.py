"""Convolutions of images with few channels on wgmma compute what the rule does, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, given, proposed
from support.wgmma_cases import FEW_CHANNELS, SMEM_CONV_PARAMS, SMEM_CONVOLUTIONS, THREE_BY_THREE

pytestmark = pytest.mark.gpu

POLICY = proposed("wgmma_window", step=5)
PROPOSED: list[dict[str, Any]] = [
    FEW_CHANNELS | {"n": 16, "h": 224, "w": 224},
    FEW_CHANNELS | {"n": 5, "h": 75, "w": 88, "epilogue": ["bias", "relu"], "dtype": "bfloat16"},
    FEW_CHANNELS | {"n": 300, "out_dtype": "float32", "f": 200},
    THREE_BY_THREE | {"n": 9, "h": 224, "w": 224, "epilogue": ["bias", "gelu"]},
    THREE_BY_THREE | {"n": 64, "h": 28, "w": 32, "c": 1, "f": 32},
]


@pytest.mark.parametrize(
    "case",
    [
        Case.numbered(at, "conv2d", attrs, given("wgmma_window", SMEM_CONV_PARAMS | params))
        for at, (attrs, params) in enumerate(SMEM_CONVOLUTIONS)
    ],
    ids=str,
)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", [Case.numbered(at, "conv2d", attrs, POLICY) for at, attrs in enumerate(PROPOSED)], ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)
