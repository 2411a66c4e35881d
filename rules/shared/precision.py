"""Owns the dtype of accumulators, the dtype of results, and how far rounding may take a result from its reference.

Knows nothing of any one operator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from kerneldecl.arrays import PERIOD, Array
from kerneldecl.lazy import np
from kerneldecl.rule import dtype_tolerance

OperandDtype = Literal["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]
"""Dtype of the operands of a GEMM or a convolution."""
AccumDtype = Literal["float16", "float32", "float64", "int32", "int64"]
"""Dtype of accumulators."""

UNIT_ROUNDOFF = {"float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
SIGNIFICANT_BITS = {
    "float8_e5m2": 3,
    "float8_e4m3fn": 4,
    "bfloat16": 8,
    "float16": 11,
    "float32": 24,
    "float64": 53,
    "int8": 8,
    "uint8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
}


def is_integer(dtype: str) -> bool:
    return dtype.startswith(("int", "uint"))


def accum_dtype(dtype: str, declared: str = "") -> str:
    """Return the dtype that `dtype` is accumulated in: the declared one, else 32 bits of the same kind, or float64 for float64."""
    return declared or (dtype if dtype in {"float64", "int64"} else "int32" if is_integer(dtype) else "float32")


def out_dtype(dtype: str, declared: str = "") -> str:
    """Return the dtype of the result: the declared one, else `dtype` for floating point and int32 for integers."""
    return declared or ("int32" if is_integer(dtype) else dtype)


def accum_problems(dtype: str, accum: str, out: str) -> Iterator[str]:
    """Yield why `dtype` cannot be accumulated in `accum`, or the result not be stored as `out`."""
    if is_integer(dtype) != is_integer(accum):
        yield f"accum_dtype {accum} does not suit dtype {dtype}: one is an integer, the other is not; leave it out"
    elif SIGNIFICANT_BITS[accum] < SIGNIFICANT_BITS[dtype]:
        yield f"accum_dtype {accum} is narrower than dtype {dtype}; leave it out"
    if is_integer(out) and not is_integer(accum):
        yield f"out_dtype {out} would cut off the fractions that accum_dtype {accum} keeps; leave it out"
    elif is_integer(out) and SIGNIFICANT_BITS[out] < SIGNIFICANT_BITS[accum]:
        yield f"out_dtype {out} is narrower than accum_dtype {accum}: results would wrap around; leave it out"


def reference_dtype(out: str, *dtypes: str) -> type[np.floating[Any]]:
    """Return what a reference accumulates products of such dtypes in: float32 where its rounding does not show in `out`.

    Up to 2**37 products of 8-bit integers are accumulated exactly in float64, for which NumPy has a fast GEMM.
    """
    is_narrow = all(SIGNIFICANT_BITS[dtype] <= SIGNIFICANT_BITS["float16"] and not is_integer(dtype) for dtype in (out, *dtypes))
    return np.float32 if is_narrow else np.float64


def as_tfloat32(array: Array) -> Array:
    """Return float32 rounded towards zero to TF32: without the last 13 bits of the mantissa."""
    return (array.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


FLOAT8_ROUNDOFF = 2.0**-14
"""Unit roundoff of float8 accumulation on tensor cores, which keep about 14 bits (DeepSeek-V3 Technical Report, 2024, 3.3.2)."""


TFLOAT32_TERMS = 8
"""Products that a tensor core adds to an accumulator at once. It rounds towards zero, so that errors add up (Fasi, Higham,
Mikaitis, Pranesh, Numerical behavior of NVIDIA tensor cores, 2021)."""


def accum_tolerance(out: str, accum: str, terms: int, dtype: str = "") -> float:
    """Return the relative error allowed of `terms` products of `dtype`, accumulated in `accum` and stored as `out`.

    Rounding errors of an accumulation grow like a random walk, with the square root of its length (Higham and Mary,
    A new approach to probabilistic rounding error analysis, 2019). The factor 4 covers the worst of a million elements.
    """
    roundoff = max(UNIT_ROUNDOFF.get(accum, 0.0), FLOAT8_ROUNDOFF if dtype.startswith("float8") else 0.0)
    truncated = UNIT_ROUNDOFF["float32"] * terms / TFLOAT32_TERMS if dtype == "tfloat32" else 0.0
    return dtype_tolerance(out) + 4 * roundoff * math.sqrt(terms) + truncated


def largest_summand(accum: str, terms: int) -> float:
    """Return the largest input that verification should put among `terms` products accumulated in `accum`.

    In reductions longer than PERIOD it repeats, and products with it cancel each other. What float16 then leaves of results depends on
    the order of additions alone: with 32 in a column of 7336 terms, right kernels are off by 0.2 to 0.5, with 1 by 0.02 to 0.06.
    """
    return 1.0 if accum == "float16" and terms > PERIOD else math.inf
