"""Owns the special values that verification puts among a kernel's inputs: zeros, tiny and huge numbers, infinities, NaN.

Knows nothing of rules, kernels or devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kerneldecl.arrays import PERIOD, Array, by_rows, numpy_dtype

NAN = (math.nan,)
INFINITIES = (math.inf, -math.inf)
_TINY = {
    "float16": (2.0**-24, 2.0**-14),
    "bfloat16": (2.0**-126,),
    "float32": (2.0**-140, 2.0**-126),
    "float64": (2.0**-1060, 2.0**-1022),
    "float8_e5m2": (2.0**-16,),
    "float8_e4m3fn": (2.0**-9,),
}
"""Smallest normal numbers, and subnormal ones where GPUs compute with them (bfloat16 is computed with flushing to zero)."""
_HUGE = {"float16": 32.0, "bfloat16": 2.0**30, "float32": 2.0**30, "float64": 2.0**200}
"""Numbers whose third power is finite: what computes powers of them in their dtype is no error of the kernel."""
REPEATED_HUGE = 32.0
"""The same for an array in which a place repeats: two such numbers may cancel each other in a sum, and rounding leaves little of 32."""
_LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127, "float32": float(np.finfo(np.float32).max), "float8_e5m2": 57344.0}
"""Largest finite number of a dtype with infinities that a reference may exceed."""
_SPARSE = 8
"""An array has at most one special value for so many elements, and one at least."""


def small(dtype: str) -> tuple[float, ...]:
    """Return zeros and tiny numbers of a floating-point dtype."""
    return (0.0, -0.0, *_TINY[dtype], *(-tiny for tiny in _TINY[dtype]))


def large(dtype: str, at_most: float) -> tuple[float, ...]:
    """Return infinities and a huge number that is not over a limit, as far as the dtype has them.

    There is one huge number, so that no two cancel each other: what rounding leaves of a difference is no error of the kernel.
    """
    return (*(INFINITIES if has_infinity(dtype) else ()), *((min(_HUGE[dtype], at_most),) if dtype in _HUGE else ()))


def has_infinity(dtype: str) -> bool:
    return dtype != "float8_e4m3fn"


def sprinkled(rng: np.random.Generator, array: Array, values: Sequence[float]) -> Array:
    """Return the array with each value at a random place, the first ones at least; fewer values in a small array.

    Along axes longer than PERIOD a place repeats, as rows of large operands do.
    """
    out = array.copy()
    for value in values[: max(1, array.size // _SPARSE)]:
        at = (int(rng.integers(min(extent, PERIOD))) for extent in array.shape)
        where = tuple(slice(first, None, PERIOD) for first in at)
        out[where] = np.array(value).astype(out.dtype)
    return out


def in_range(expected: Array, dtype: str) -> Array:
    """Return expected results with infinities where an output of `dtype` cannot hold them."""
    largest = _LARGEST.get(dtype)
    if largest is None or numpy_dtype(dtype) == expected.dtype:
        return expected
    flat = expected.reshape(-1)

    def part(rows: slice) -> Array:
        values = flat[rows]
        return np.where(np.abs(values) > largest, np.copysign(np.inf, values), values).astype(expected.dtype, copy=False)

    return by_rows(np.empty_like(flat), part, 1).reshape(expected.shape)
