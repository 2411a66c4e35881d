"""Owns how arguments of kernels are made, poisoned and compared in NumPy.

Knows nothing of rules, kernels or devices.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kerneldecl.model import Arg

Array = np.ndarray[Any, Any]

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


def random_array(rng: np.random.Generator, arg: Arg) -> Array:
    """Return random values: standard normal for floating point, the dtype's range cut to [-128, 127] for integers."""
    dtype = numpy_dtype(arg.dtype)
    if is_float(arg.dtype):
        return rng.standard_normal(arg.shape, dtype=np.float32).astype(dtype)
    if arg.dtype == "bool":
        return rng.integers(0, 2, arg.shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(max(info.min, -128), min(info.max, 127), arg.shape, endpoint=True).astype(dtype)


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
