"""Owns what norms of rows have around them: a residual added before, and rows quantised after with a scale each.

Knows nothing of which norm it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from kerneldecl.analysis.fused_norm import LEAST_LARGEST, LIMITS
from kerneldecl.arrays import Array, numpy_dtype
from kerneldecl.lazy import np
from kerneldecl.model import Arg
from kerneldecl.rule import dtype_tolerance

Quantized = Literal["", "float8_e4m3fn", "int8"]
"""Dtype of a quantised output; empty for one that is not."""


def norm_problems(shape: Sequence[int], dtype: str, out_dtype: str) -> Iterator[str]:
    if not shape:
        yield "shape has no extent; write shape = [16, 64], or other extents"
    if out_dtype and dtype == "float64":
        yield f"out_dtype {out_dtype} is computed from float32 at most, not from float64; leave it out"


def norm_outputs(shape: tuple[int, ...], dtype: str, out_dtype: str, *, has_residual: bool) -> tuple[Arg, ...]:
    """Return Y, H with a residual, and the scales of rows with a quantised Y."""
    added = (Arg("H", shape, dtype),) if has_residual else ()
    scale = (Arg("scale", shape[:-1], "float32"),) if out_dtype else ()
    return (Arg("Y", shape, out_dtype or dtype), *added, *scale)


def residual_sum(x: Array, residual: Array, dtype: str) -> Array:
    """Return X + R rounded to the dtype, which is what is normalised, in float64."""
    return np.asarray((x.astype(np.float64) + residual.astype(np.float64)).astype(numpy_dtype(dtype)).astype(np.float64))


def quantized(y: Array, out_dtype: str) -> tuple[Array, Array]:
    """Return rows divided by their scales, not rounded, and the scales."""
    scale = np.maximum(np.abs(y).max(axis=-1), LEAST_LARGEST) / LIMITS[out_dtype]
    return y / scale[..., None], scale


def norm_tolerance(dtype: str, out_dtype: str) -> float:
    """Return the relative error allowed; rounding to whole numbers is one of 0.5, beside most elements of a row, which are below 10."""
    return max(dtype_tolerance(dtype), 0.1 if out_dtype == "int8" else dtype_tolerance(out_dtype))
