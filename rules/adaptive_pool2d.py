"""Owns pooling of images to a given size: the maximum or the mean of windows that cover the image, whatever its size.

Knows nothing of how a schedule shares windows' elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class AdaptivePool2d(Rule):
    """Y[i] = the maximum or the mean of rows i * h // rows to (i + 1) * h / rows, rounded up, of X; and so with columns."""

    op: Literal["max", "mean"]
    """The reduction over each window: its maximum or its mean."""
    n: Extent
    """Images."""
    h: Extent
    """Rows of an image of X."""
    w: Extent
    """Columns of an image of X."""
    c: Extent
    """Channels."""
    rows: Extent
    """Rows of an image of Y; 1 for global pooling."""
    columns: Extent
    """Columns of an image of Y."""
    layout: Literal["nhwc", "nchw"] = "nhwc"
    """Order of the axes of X and Y."""
    dtype: FloatDtype = "float32"
    """Dtype of X and Y; means of 16-bit ones are accumulated in float32."""

    def problems(self) -> Iterator[str]:
        for name, results, side in (("rows", self.rows, self.h), ("columns", self.columns, self.w)):
            if results > side:
                yield f"{name} {results} is more than the image has, {side}; rule resize2d enlarges"

    def signature(self) -> Signature:
        x, y = (self.n, self.h, self.w, self.c), (self.n, self.rows, self.columns, self.c)
        if self.layout == "nchw":
            x, y = ((n, c, h, w) for n, h, w, c in (x, y))
        return Signature((Arg("X", x, self.dtype),), (Arg("Y", y, self.dtype),))

    def lower(self) -> list[Any]:
        """Return one reduction over the largest window; where windows differ, elements beyond a smaller one count for nothing."""
        from tvm import te, tirx

        (source,), (out,) = self.signature().inputs, self.signature().outputs
        x = te.placeholder(source.shape, source.dtype, "X")
        accum = "float32" if self.op == "mean" and self.dtype in {"float16", "bfloat16"} else self.dtype
        nothing = tirx.const(0, accum) if self.op == "mean" else te.min_value(self.dtype)
        down, along = _largest(self.h, self.rows), _largest(self.w, self.columns)
        i, j = te.reduce_axis((0, down), "i"), te.reduce_axis((0, along), "j")
        is_even = self.h % self.rows == 0 and self.w % self.columns == 0

        def places(at: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
            return (at[0], at[2], at[3], at[1]) if self.layout == "nchw" else (at[0], at[1], at[2], at[3])

        def pooled(*at: Any) -> Any:
            image, row, column, c = places(at)
            y, x_at = _first(row, self.h, self.rows) + i, _first(column, self.w, self.columns) + j
            inside = tirx.all(y < _end(row, self.h, self.rows), x_at < _end(column, self.w, self.columns))
            y, x_at = (y, x_at) if is_even else (tirx.min(y, self.h - 1), tirx.min(x_at, self.w - 1))
            value = (x(image, c, y, x_at) if self.layout == "nchw" else x(image, y, x_at, c)).astype(accum)
            combine = te.sum if self.op == "mean" else te.max
            return combine(value if is_even else tirx.Select(inside, value, nothing), axis=[i, j])

        if self.op == "max":
            return [x, te.compute(out.shape, pooled, name="Y")]
        sums = te.compute(out.shape, pooled, name="sums")

        def mean(*at: Any) -> Any:
            _, row, column, _ = places(at)
            height = _end(row, self.h, self.rows) - _first(row, self.h, self.rows)
            width = _end(column, self.w, self.columns) - _first(column, self.w, self.columns)
            count = tirx.const(down * along, accum) if is_even else (height * width).astype(accum)
            return (sums(*at) / count).astype(self.dtype)

        return [x, te.compute(out.shape, mean, name="Y")]

    def reference(self, *inputs: Array) -> Array:
        x = inputs[0].astype(np.float64)
        x = x if self.layout == "nchw" else x.transpose(0, 3, 1, 2)
        y = np.empty((self.n, self.c, self.rows, self.columns))
        for row, column in np.ndindex(self.rows, self.columns):
            high = slice(_first(row, self.h, self.rows), _end(row, self.h, self.rows))
            wide = slice(_first(column, self.w, self.columns), _end(column, self.w, self.columns))
            window = x[:, :, high, wide]
            y[:, :, row, column] = window.max((2, 3)) if self.op == "max" else window.mean((2, 3))
        return np.ascontiguousarray(y if self.layout == "nchw" else y.transpose(0, 2, 3, 1))

    def flops(self) -> int:
        """Return one operation for each element of the largest window, and for a mean a division."""
        window = _largest(self.h, self.rows) * _largest(self.w, self.columns)
        return self.n * self.rows * self.columns * self.c * (window + (self.op == "mean"))

    def nan_may_vanish(self) -> bool:
        """Say that maxima of NaN may be any number: instructions for maxima differ in that."""
        return self.op == "max"


def _first(place: Any, side: int, results: int) -> Any:
    """Return the first pixel of a window, of Python's or TVM's whole numbers."""
    return place * (side // results) if side % results == 0 else place * side // results


def _end(place: Any, side: int, results: int) -> Any:
    """Return the pixel behind a window."""
    return (place + 1) * (side // results) if side % results == 0 else ((place + 1) * side + results - 1) // results


def _largest(side: int, results: int) -> int:
    """Return the pixels of the largest window along a side."""
    return max(int(_end(place, side, results)) - int(_first(place, side, results)) for place in range(results))
