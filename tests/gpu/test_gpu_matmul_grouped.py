"""Grouped GEMM on mma.sync and on CUDA cores computes what the rule does: on a real GPU."""

from __future__ import annotations

import pytest
from support.gpu_kernels import Case, Checked, given, proposed
from support.grouped_cases import MASKED, RULE, SMALL

pytestmark = pytest.mark.gpu

TEMPLATE = "gpu_matmul_grouped"
SIMT = {"block_m": 64, "block_n": 64, "thread_m": 8, "thread_n": 8, "blocks": 2}
PLAIN = {"block_m": 64, "block_n": 64, "warps_m": 2, "warps_n": 2, "stages": 3, "blocks": 1}
CASES = [
    Case("contiguous", RULE, SMALL | {"used": 170}, given(TEMPLATE, PLAIN, PLAIN | {"block_m": 16, "warps_m": 1, "stages": 4})),
    Case("masked, n last", RULE, SMALL | MASKED | {"layout": "nn", "dtype": "bfloat16"}, given(TEMPLATE, PLAIN)),
    Case("float32, odd sizes", RULE, SMALL | {"dtype": "float32", "k": 203, "n": 135}, given("gpu_matmul_grouped_simt", SIMT)),
    Case(
        "the policy's on CUDA cores",
        RULE,
        {"rows": 4096, "groups": 32, "n": 1000, "k": 776, "dtype": "float32"},
        proposed(TEMPLATE, step=3),
    ),
    Case("the policy's", RULE, {"rows": 4096, "groups": 32, "n": 1000, "k": 776}, proposed(TEMPLATE, step=3)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_right_results(case: Case, check: Checked) -> None:
    check(case)
