"""Owns pooling of images: the maximum or the mean of windows.

Knows nothing of how a schedule shares windows' elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature, Size


@dataclass(frozen=True, kw_only=True)
class Pool2d(Rule):
    """Y = the maximum or the mean of windows of kh x kw pixels of each channel of X; a window of h x w is global pooling."""

    op: Literal["max", "mean"]
    """The reduction over each window: its maximum or its mean."""
    n: Extent
    """Images."""
    h: Extent
    """Rows of an image."""
    w: Extent
    """Columns of an image."""
    c: Extent
    """Channels."""
    kh: Extent
    """Rows of a window."""
    kw: Extent
    """Columns of a window."""
    stride: Extent = 1
    """Pixels from a window to the next, in both directions."""
    padding: Size = 0
    """Pixels around the image, on all four sides: none of a maximum, zeros of a mean."""
    count_padding: bool = True
    """Whether a mean divides by kh * kw everywhere (True), or by the pixels of the window inside the image."""
    layout: Literal["nhwc", "nchw"] = "nhwc"
    """Layout of X and Y."""
    dtype: FloatDtype = "float32"
    """Dtype of X and Y; means of 16-bit ones are accumulated in float32."""

    @property
    def _out(self) -> tuple[int, int]:
        return tuple((extent + 2 * self.padding - window) // self.stride + 1 for extent, window in ((self.h, self.kh), (self.w, self.kw)))  # type: ignore[return-value]

    def problems(self) -> Iterator[str]:
        for extent, window, name in ((self.h, self.kh, "kh"), (self.w, self.kw, "kw")):
            if window > extent + 2 * self.padding:
                yield f"{name} {window} is larger than the padded image, {extent + 2 * self.padding}; write a smaller one"
        if 2 * self.padding > min(self.kh, self.kw):
            yield f"padding {self.padding} is more than half of a window, so that windows may hold padding alone; write less"

    def signature(self) -> Signature:
        rows, columns = self._out
        x, y = (self.n, self.h, self.w, self.c), (self.n, rows, columns, self.c)
        if self.layout == "nchw":
            x, y = ((n, c, h, w) for n, h, w, c in (x, y))
        return Signature((Arg("X", x, self.dtype),), (Arg("Y", y, self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te, tirx

        (source,), (out,) = self.signature().inputs, self.signature().outputs
        x = te.placeholder(source.shape, source.dtype, "X")
        accum = "float32" if self.op == "mean" and self.dtype in {"float16", "bfloat16"} else self.dtype
        nothing = tirx.const(0, accum) if self.op == "mean" else te.min_value(self.dtype)

        def split(at: tuple[Any, ...]) -> tuple[Any, Any, Any, Any]:
            return (at[0], at[2], at[3], at[1]) if self.layout == "nchw" else at  # type: ignore[return-value]

        def inside(row: Any, column: Any) -> Any:
            return tirx.all(row >= 0, row < self.h, column >= 0, column < self.w)

        def pixel(n: Any, row: Any, column: Any, c: Any) -> Any:
            value = (x(n, c, row, column) if self.layout == "nchw" else x(n, row, column, c)).astype(accum)
            return tirx.if_then_else(inside(row, column), value, nothing) if self.padding else value

        i, j = te.reduce_axis((0, self.kh), "i"), te.reduce_axis((0, self.kw), "j")

        def pooled(*at: Any) -> Any:
            n, row, column, c = split(at)
            combine = te.sum if self.op == "mean" else te.max
            return combine(pixel(n, row * self.stride + i - self.padding, column * self.stride + j - self.padding, c), axis=[i, j])

        if self.op == "max":
            return [x, te.compute(out.shape, pooled, name="Y")]
        sums = te.compute(out.shape, pooled, name="sums")

        def mean(*at: Any) -> Any:
            _, row, column, _ = split(at)
            return (sums(*at) / self._count(row, column, accum)).astype(self.dtype)

        return [x, te.compute(out.shape, mean, name="Y")]

    def _count(self, row: Any, column: Any, accum: str) -> Any:
        """Return how many pixels the mean of a window divides by, in TE."""
        from tvm import tirx

        if self.count_padding or not self.padding:
            return tirx.const(self.kh * self.kw, accum)

        def extent(place: Any, window: int, most: int) -> Any:
            first = place * self.stride - self.padding
            return tirx.min(first + window, most) - tirx.max(first, 0)

        return (extent(row, self.kh, self.h) * extent(column, self.kw, self.w)).astype(accum)

    def reference(self, *inputs: Array) -> Array:
        x = inputs[0].astype(np.float64)
        x = x.transpose(0, 2, 3, 1) if self.layout == "nchw" else x
        around = ((0, 0), (self.padding, self.padding), (self.padding, self.padding), (0, 0))

        def windows(array: Array, value: float) -> Array:
            padded = np.pad(array, around, constant_values=value)
            found = np.lib.stride_tricks.sliding_window_view(padded, (self.kh, self.kw), (1, 2))
            return found[:, :: self.stride, :: self.stride]

        if self.op == "max":
            y = windows(x, -np.inf).max((-2, -1))
        else:
            ones = np.ones((1, self.h, self.w, 1))
            count = windows(ones, float(self.count_padding)).sum((-2, -1))
            y = windows(x, 0.0).sum((-2, -1)) / count
        return np.asarray(y.transpose(0, 3, 1, 2) if self.layout == "nchw" else y)

    def flops(self) -> int:
        """Return one operation for each element of each window, and for a mean a division."""
        rows, columns = self._out
        return self.n * rows * columns * self.c * (self.kh * self.kw + (self.op == "mean"))

    def nan_may_vanish(self) -> bool:
        """Say that maxima of NaN may be any number: instructions for maxima differ in that."""
        return self.op == "max"
