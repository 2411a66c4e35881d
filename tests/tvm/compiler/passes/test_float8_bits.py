"""Conversions from float8 on GPUs without an instruction: those of ml_dtypes for every number, NaN and subnormal ones included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import Kernel
from support.compilers import needs_nvcc
from support.repository import REPOSITORY

from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.passes.float8_bits import float8_by_bits
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.templates import gpu_fallback

A100, L4 = (load_arch(REPOSITORY, name) for name in ("a100-80gb", "l4"))
CASTS = [(dtype, out) for dtype in ("float8_e4m3fn", "float8_e5m2") for out in ("float16", "float32")]


def scheduled(dtype: str, out: str) -> Any:
    rule = load_rule(REPOSITORY, "cast").of(REPOSITORY, {"shape": (256,), "dtype": dtype, "out_dtype": out})
    made = gpu_fallback.apply(canonical.lower(rule), {"threads": 64, "across": False}, A100)
    assert made is not None
    return made.mod


@needs_nvcc
@pytest.mark.parametrize(("dtype", "out"), CASTS)
def test_every_number(dtype: str, out: str) -> None:
    values = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype))
    [_, got] = Kernel(scheduled(dtype, out)["main"], float8_by_bits)(values, np.zeros(256, out))
    np.testing.assert_array_equal(got, values.astype(out))


def test_gpus_with_an_instruction_keep_it() -> None:
    sources = {arch.name: cuda_source(scheduled("float8_e4m3fn", "float16"), arch, "kernel") for arch in (A100, L4)}
    assert "(half)X_ptr" in sources["l4"]
    assert "(half)X_ptr" not in sources["a100-80gb"]
