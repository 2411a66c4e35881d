"""Gated GEMMs on wgmma compute what the rule does, on a real GPU."""

from __future__ import annotations

from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, given, proposed
from support.wgmma_cases import GATED_GEMMS, PLAIN, SMS

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {"m": 136, "n": 72, "k": 200, "dtype": "float16"}
CASES = [
    *(
        Case(name, "matmul_gated", SMALL | attrs, given("wgmma_matmul_gated", PLAIN | params), SMS)
        for name, (attrs, params) in GATED_GEMMS.items()
    ),
    *(
        Case(f"{m} rows", "matmul_gated", {"m": m, "n": 1408, "k": 1024, "dtype": "bfloat16"}, proposed("wgmma_matmul_gated"))
        for m in (1, 300, 1024)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gated_gemms_compute_the_reference(case: Case, check: Checked) -> None:
    check(case)
