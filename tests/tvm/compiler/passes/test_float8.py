"""Conversions from and to float8 on the CPU: every value of 8 bits, and rounding as ml_dtypes rounds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from support.repository import REPOSITORY
from tvm import te

from kerneldecl.arrays import numpy_dtype
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler.cpu import PIPELINE, target_of
from kerneldecl.plugins.load import load_arch

TARGET = target_of(load_arch(REPOSITORY, "host"))
FORMATS = ("float8_e4m3fn", "float8_e5m2")


def converted(values: np.ndarray[Any, Any], source: str, dtype: str) -> np.ndarray[Any, Any]:
    """Return what a compiled kernel makes of values."""
    given = te.placeholder(values.shape, source, "given")
    func = te.create_prim_func([given, te.compute(values.shape, lambda i: given[i].astype(dtype), "converted")])
    out = np.zeros(values.shape, numpy_dtype(dtype))
    tvm.tirx.build(func, target=TARGET, pipeline=PIPELINE)(tensor(values), tensor(out))
    return out


def assert_same(got: np.ndarray[Any, Any], want: np.ndarray[Any, Any]) -> None:
    is_nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), is_nan)
    unsigned = f"uint{8 * want.itemsize}"
    np.testing.assert_array_equal(got[~is_nan].view(unsigned), want[~is_nan].view(unsigned))  # bits: zeros have signs


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("wide", ["float32", "float16", "bfloat16", "float64"])
def test_every_value_is_widened_as_it_is(dtype: str, wide: str) -> None:
    values = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype))
    assert_same(converted(values, dtype, wide), values.astype(numpy_dtype(wide)))


@pytest.mark.parametrize("dtype", FORMATS)
def test_numbers_are_rounded_to_the_nearest(dtype: str) -> None:
    exact = np.arange(256, dtype=np.uint8).view(numpy_dtype(dtype)).astype(np.float32)
    finite = np.sort(exact[np.isfinite(exact)])
    halfway = (finite[1:] + finite[:-1]) / 2
    beside = [np.nextafter(halfway, np.float32(towards)) for towards in (np.inf, -np.inf)]
    drawn = np.random.default_rng(7).standard_normal(20000, dtype=np.float32) * np.logspace(-9, 6, 20000, dtype=np.float32)
    extremes = np.array([np.inf, -np.inf, np.nan, 1e30, -1e30, 1e-30, 448, 464, 480, 57344, 61440, 65536], np.float32)
    values = np.concatenate([exact, halfway, *beside, drawn, extremes])
    assert_same(converted(values, "float32", dtype), values.astype(numpy_dtype(dtype)))


def test_one_format_becomes_the_other() -> None:
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2)
    assert_same(converted(values, "float8_e5m2", "float8_e4m3fn"), values.astype(np.float32).astype(ml_dtypes.float8_e4m3fn))
