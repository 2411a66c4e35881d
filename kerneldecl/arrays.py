"""Owns how arguments of kernels are made, poisoned and compared in NumPy.

Knows nothing of rules, kernels or devices.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ml_dtypes
import numpy as np

from kerneldecl.hardware.blas_threads import one_thread
from kerneldecl.model import Arg

Array = np.ndarray[Any, Any]
Result = TypeVar("Result")

ALIGNMENT_BYTES = 64
"""Kernels load whole vectors and crash the process where memory is aligned to less (TVM's kAllocAlignment); NumPy gives 16."""


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return NumPy's dtype for TVM's spelling, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def aligned(array: Array) -> Array:
    """Return the array in C order at an address that kernels can take; itself where it is so already, else a copy."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0:
        return array
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


BLOCK_ELEMENTS = 1_048_583
"""Random numbers for hundreds of millions of elements would take seconds; so many are repeated instead.

A prime: an index that is off by a few rows, tiles or vectors still meets another number.
"""


def random_array(rng: np.random.Generator, arg: Arg, scale: float = 1.0) -> Array:
    """Return random values: `scale` times standard normal ones for floating point, whole numbers else.

    Whole numbers have the dtype's range, cut to [-128, 127]; they are not scaled.
    """
    return np.resize(_random(rng, arg.dtype, min(math.prod(arg.shape), BLOCK_ELEMENTS), scale), arg.shape)


def _random(rng: np.random.Generator, dtype: str, count: int, scale: float) -> Array:
    if is_float(dtype):
        return (rng.standard_normal(count, dtype=np.float32) * np.float32(scale)).astype(numpy_dtype(dtype))
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(numpy_dtype(dtype))
    info = np.iinfo(numpy_dtype(dtype))
    return rng.integers(max(info.min, -128), min(info.max, 127), count, endpoint=True).astype(numpy_dtype(dtype))


PERIOD = 2039
"""Rows of a large factor that differ; the others repeat them, so that a reference need not compute the same sums again.

A prime: a tile, or a few, further on there are other rows.
"""


def repeated(array: Array, extent: int, axis: int) -> Array:
    """Return the array, repeated along an axis up to an extent."""
    have = array.shape[axis]
    if have == extent:
        return array
    out = np.empty([*array.shape[:axis], extent, *array.shape[axis:][1:]], array.dtype)
    source, target = np.moveaxis(array, axis, 0), np.moveaxis(out, axis, 0)

    def fill(start: int) -> None:
        part = target[start : start + have]
        part[...] = source[: len(part)]

    _on_all_cores(fill, range(0, extent, have))
    return out


def distinct(array: Array, axis: int) -> int:
    """Return after how many slices along an axis the array repeats itself: PERIOD, or the whole extent."""
    along = np.moveaxis(array, axis, 0)
    if len(along) <= PERIOD:
        return len(along)

    def is_same(start: int) -> bool:
        part = along[start : start + PERIOD]
        return np.array_equal(part, along[: len(part)])

    return PERIOD if all(_on_all_cores(is_same, range(PERIOD, len(along), PERIOD))) else len(along)


_PART_ELEMENTS = 1 << 18
"""What a core works on at a time: its temporaries stay in its caches."""


def by_rows(out: Array, function: Callable[[slice], Array], row_elements: int) -> Array:
    """Fill `out[rows] = function(rows)` for slices of the first axis, on all cores, and return it: NumPy itself uses one.

    `row_elements` says how many elements, of all arrays together, a row stands for.
    """
    count = max(1, _PART_ELEMENTS // max(1, row_elements))

    def fill(start: int) -> None:
        rows = slice(start, start + count)
        out[rows] = function(rows)

    _on_all_cores(fill, range(0, len(out), count))
    return out


def _on_all_cores(function: Callable[[int], Result], items: Sequence[int]) -> list[Result]:
    cores = len(os.sched_getaffinity(0))
    # Where every core has products of its own, more threads for each would only take turns with each other.
    with ThreadPoolExecutor(cores) as pool, one_thread() if len(items) >= cores else contextlib.nullcontext():
        return list(pool.map(function, items))


def widened(array: Array, dtype: Any) -> Array:
    """Return the array as another dtype, its axes in memory in the order in which they were, converted on all cores."""
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    inner = array.transpose(order)
    flat = inner.reshape(-1)
    made = by_rows(np.empty(flat.shape, dtype), lambda part: flat[part], 1).reshape(inner.shape)
    return made.transpose(np.argsort(order))


def poisoned(arg: Arg) -> Array:
    """Return an array that no kernel leaves as it is by chance: NaN for floating point, bytes 0xA5 else."""
    dtype = numpy_dtype(arg.dtype)
    if is_float(arg.dtype):
        return np.full(arg.shape, np.nan, dtype)
    return np.frombuffer(b"\xa5" * (int(np.prod(arg.shape)) * dtype.itemsize), dtype).reshape(arg.shape).copy()


def relative_error(got: Array, want: Array) -> float:
    """Return the largest |got - want| / (|want| + rms(want)) over all elements; infinity where `got` has a NaN that `want` has not.

    The root mean square keeps elements near zero, which are sums that cancelled, from being judged by their own size.
    """
    got64, want64 = got.astype(np.float64), want.astype(np.float64)
    same = (got64 == want64) | (np.isnan(got64) & np.isnan(want64))
    if same.all():
        return 0.0
    finite = want64[np.isfinite(want64)]
    rms = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.abs(got64 - want64) / (np.abs(want64) + rms)
    error = np.where(same, 0.0, error)
    return float("inf") if np.isnan(error).any() else float(error.max())
