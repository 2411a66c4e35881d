"""Owns the tests of what is kept of an error's message.

Knows nothing of workers.
"""

from __future__ import annotations

import pytest

from kerneldecl.runners.reasons import reason_of

LAUNCH = "CUDALaunch Error: CUDA_ERROR_INVALID_VALUE\n grid=(2048,1,1),  block=(32,2,1)\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LAUNCH, "CUDALaunch Error: CUDA_ERROR_INVALID_VALUE: grid=(2048,1,1),  block=(32,2,1)"),
        ("Traceback:\n  File cuda.cc\nCheck failed: (x) is false: \n\n", "Check failed: (x) is false:"),
        ("a trace\nCUDAError: cuModuleLoad: CUDA_ERROR_INVALID_PTX", "CUDAError: cuModuleLoad: CUDA_ERROR_INVALID_PTX"),
        (" \n", ""),
    ],
)
def test_the_line_that_says_what_happened_is_kept(text: str, reason: str) -> None:
    assert reason_of(text) == reason
