"""Owns by how much random inputs shrink where results of them would leave the range of the outputs' dtypes, as sums of many terms do.

Knows nothing of rules, kernels or devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from ml_dtypes import finfo

from kerneldecl.arrays import Array, is_float, numpy_dtype
from kerneldecl.runners.special_values import has_infinity
from kerneldecl.signature import Arg

ROOM = 4.0
"""How much smaller than the largest number of their dtype results are made: those of other seeds are of the same size, not equal."""
NEAR = 1 / 16
"""Part of the largest number by which results may miss it: a kernel's rounding makes infinity of less. Where there is no infinity, kernels
round what is so little larger to the largest number, which is how quantised rows have it."""
MOST = 10
"""Times that inputs are halved at most: normal ones of 16 bits are still normal numbers then."""
_SLICE = 1 << 18
"""Elements that are looked at together: temporaries stay in the caches."""


def within_range(
    inputs: Sequence[Array], given: Sequence[Arg], results: Callable[[Sequence[Array]], tuple[Array, ...]], outputs: Sequence[Arg]
) -> tuple[tuple[Array, ...], tuple[Array, ...], int]:
    """Return inputs whose results stay inside of the range of their dtypes, the results, and how often floating-point inputs were halved.

    Inputs whose results stay inside, and those of a function that grows whatever they are, come back as they are, halved 0 times.
    """
    first = results(inputs)
    made, expected, times = tuple(inputs), first, 0
    while (more := halvings(expected, outputs)) and times + more <= MOST and any(is_float(arg.dtype) for arg in given):
        times += more
        made = halved(inputs, given, times)
        expected = results(made)
    return (tuple(inputs), first, 0) if more else (made, expected, times)


def halvings(results: Sequence[Array], outputs: Sequence[Arg]) -> int:
    """Return how often results must be halved to leave room below the largest number of their dtypes; 0 where all are inside.

    Infinities and NaN do not count: they are what a function is there.
    """
    floats = [(want, arg.dtype) for want, arg in zip(results, outputs, strict=True) if is_float(arg.dtype)]
    beyond = [excess for want, dtype in floats if (excess := _largest(want) / _largest_number(dtype)) > _limit(dtype)]
    return math.ceil(math.log2(max(beyond) * ROOM)) if beyond else 0


def halved(inputs: Sequence[Array], given: Sequence[Arg], times: int) -> tuple[Array, ...]:
    """Return inputs of which those in floating point are halved so often, which rounds none but subnormal numbers."""
    if not times:
        return tuple(inputs)
    return tuple(
        array * np.array(2.0**-times, array.dtype) if is_float(arg.dtype) else array for array, arg in zip(inputs, given, strict=True)
    )


def _largest_number(dtype: str) -> float:
    return float(finfo(numpy_dtype(dtype)).max)  # type: ignore[no-untyped-call]


def _limit(dtype: str) -> float:
    return 1 - NEAR if has_infinity(dtype) else 1 + NEAR


def _largest(array: Array) -> float:
    """Return the largest finite magnitude; 0 of an array without finite numbers."""
    flat = array.reshape(-1)
    return max((_largest_of(flat[start : start + _SLICE]) for start in range(0, flat.size, _SLICE)), default=0.0)


def _largest_of(part: Array) -> float:
    ends = float(part.min()), float(part.max())
    if all(map(math.isfinite, ends)):
        return max(map(abs, ends))
    finite = part[np.isfinite(part)]
    return max(abs(float(finite.min())), abs(float(finite.max()))) if finite.size else 0.0
