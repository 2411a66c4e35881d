"""Convolutions of images with few channels on wgmma compute what the rule does, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_kernels import Case, Checked, Choice, given, proposed
from wgmma_cases import FEW_CHANNELS, SMEM_CONV_PARAMS, SMEM_CONVOLUTIONS, THREE_BY_THREE

pytestmark = pytest.mark.gpu

POLICY = proposed("wgmma_window", step=5)
PROPOSED: list[dict[str, Any]] = [
    FEW_CHANNELS | {"n": 16, "h": 224, "w": 224},
    FEW_CHANNELS | {"n": 5, "h": 75, "w": 88, "epilogue": ["bias", "relu"], "dtype": "bfloat16"},
    FEW_CHANNELS | {"n": 300, "out_dtype": "float32", "f": 200},
    THREE_BY_THREE | {"n": 9, "h": 224, "w": 224, "epilogue": ["bias", "gelu"]},
    THREE_BY_THREE | {"n": 64, "h": 28, "w": 32, "c": 1, "f": 32},
]


def convolution(number: int, choice: Choice, attrs: dict[str, Any]) -> Case:
    told = ",".join(f"{name}={value}" for name, value in attrs.items())
    return Case(f"{number}-{told}", "conv2d", attrs, choice)


@pytest.mark.parametrize(
    "case",
    [convolution(at, given("wgmma_window", SMEM_CONV_PARAMS | params), attrs) for at, (attrs, params) in enumerate(SMEM_CONVOLUTIONS)],
    ids=str,
)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", [convolution(at, POLICY, attrs) for at, attrs in enumerate(PROPOSED)], ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)
