"""Fast-math activations of 16-bit floats take a few instructions, and are accurate to one rounding, for every 16-bit float."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulation import Kernel
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.wgmma_cases import ONE, PLAIN

from kerneldecl.compiler import canonical
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.templates import wgmma_matmul
from kerneldecl.templates.shared.fast_math import ABSOLUTE_ERROR, RELATIVE_ERROR

ROOT = REPOSITORY
M, N = 4096, 16
"""Their product is as many as there are 16-bit floats; so few columns, as each float costs N multiplications."""
TILES = PLAIN | {"block_n": N, "stages": 2, "raster_group": 1}
EXACT = {"gelu": lambda x: 0.5 * x * math.erfc(-x * math.sqrt(0.5)), "silu": lambda x: x / (1 + math.exp(min(-x, 700)))}


def kernel_of(activation: str, dtype: str, out_dtype: str) -> Any:
    attrs = {"m": M, "n": N, "k": N, "layout": "nt", "dtype": dtype, "out_dtype": out_dtype, "epilogue": [activation]}
    mod = canonical.lower(load_rule(ROOT, "matmul").of(ROOT, attrs))
    return wgmma_matmul.apply(mod, TILES, load_arch(ROOT, "h200"))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_float_is_as_good_as_rounded_once(activation: str, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    bits = np.arange(2**16, dtype="uint16").reshape(M, N)
    with np.errstate(invalid="ignore"):
        x = np.where(np.isfinite(bits.view(kind)), bits, bits.dtype.type(0)).view(kind)
    kernel = Kernel(kernel_of(activation, dtype, dtype)["main"])
    assert f"kd_quick_{activation}" in kernel.source
    result = kernel(x, np.eye(N).astype(kind), np.zeros((M, N), kind))[-1].astype("float64")
    exact = np.vectorize(EXACT[activation])(x.astype("float64"))
    ulp = np.exp2(np.floor(np.log2(np.maximum(np.abs(exact), ml_dtypes.finfo(kind).smallest_normal))) - ml_dtypes.finfo(kind).nmant)
    allowed = ulp / 2 + np.maximum(RELATIVE_ERROR * np.abs(exact), ABSOLUTE_ERROR)
    assert (np.abs(result - exact) <= allowed).all()


@needs_nvcc
def test_gelu_of_what_is_not_finite() -> None:
    attrs = {"m": 64, "n": 8, "k": 8, "layout": "nt", "dtype": "float16", "epilogue": ["gelu"]}
    mod = canonical.lower(load_rule(ROOT, "matmul").of(ROOT, attrs))
    kernel = Kernel(wgmma_matmul.apply(mod, TILES | ONE | {"block_n": 8}, load_arch(ROOT, "h200"))["main"])
    x, first = np.zeros((64, 8), "float16"), np.zeros((8, 8), "float16")
    x[:3, 0], first[:, 0] = (np.inf, -np.inf, np.nan), 1
    result = kernel(x, first, np.zeros((64, 8), "float16"))[-1]
    np.testing.assert_array_equal(result[:4, 0], [np.inf, 0, np.nan, 0])


def test_results_of_32_bits_keep_the_functions_of_full_precision() -> None:
    assert "kd_quick" not in str(kernel_of("gelu", "float16", "float32"))
    assert "kd_quick_gelu" in str(kernel_of("gelu", "float16", "float16"))
