"""Owns the resizing of images: the nearest pixel, or a bilinear mean of four.

Knows nothing of how many pixels a schedule takes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class Resize2d(Rule):
    """Y = X with another number of rows and columns. Places are computed in whole numbers, so that no pixel depends on rounding."""

    op: Literal["nearest", "bilinear"]
    """The nearest pixel, or the mean of the four around a place, weighted by distance."""
    n: Extent
    """Images."""
    h: Extent
    """Rows of an image of X."""
    w: Extent
    """Columns of an image of X."""
    c: Extent
    """Channels."""
    rows: Extent
    """Rows of an image of Y."""
    columns: Extent
    """Columns of an image of Y."""
    coordinates: Literal["half_pixel", "asymmetric", "align_corners"] = "half_pixel"
    """Where pixel i of Y lies in X, as in ONNX: (i + 1/2) * h / rows - 1/2, i * h / rows (torch's nearest), i * (h - 1) / (rows - 1)."""
    layout: Literal["nhwc", "nchw"] = "nhwc"
    """Order of the axes of X and Y."""
    dtype: FloatDtype = "float32"
    """Dtype of X and Y; means of 16-bit ones are computed in float32."""

    def problems(self) -> Iterator[str]:
        if max(self.h * self.rows, self.w * self.columns) >= 2**29:
            yield f"resizing {self.h} x {self.w} to {self.rows} x {self.columns} leaves places that 32 bits do not hold; write fewer"

    def signature(self) -> Signature:
        x, y = (self.n, self.h, self.w, self.c), (self.n, self.rows, self.columns, self.c)
        if self.layout == "nchw":
            x, y = ((n, c, h, w) for n, h, w, c in (x, y))
        return Signature((Arg("X", x, self.dtype),), (Arg("Y", y, self.dtype),))

    def _ratio(self, extent: int, results: int) -> tuple[int, int, int]:
        """Return a, b and d: pixel i of Y lies at (a * i + b) / d of X."""
        if self.coordinates == "half_pixel":
            return 2 * extent, extent - results, 2 * results
        if self.coordinates == "asymmetric":
            return extent, 0, results
        return extent - 1, 0, max(1, results - 1)

    def _nearest(self, i: Any, extent: int, results: int) -> Any:
        """Return the pixel of X for one of Y, with Python's, NumPy's or TVM's whole numbers: of two that are as near, the later one.

        With asymmetric places, it is the pixel at or before the place, as in torch.
        """
        a, b, d = self._ratio(extent, results)
        if self.coordinates == "asymmetric":
            return a * i // d
        return (2 * (a * i + b) + d) // (2 * d)

    def lower(self) -> list[Any]:
        from tvm import te, tirx

        (source,), (out,) = self.signature().inputs, self.signature().outputs
        x = te.placeholder(source.shape, source.dtype, "X")
        wide = "float64" if self.dtype == "float64" else "float32"

        def pixel(image: Any, channel: Any, row: Any, column: Any) -> Any:
            return x(image, channel, row, column) if self.layout == "nchw" else x(image, row, column, channel)

        def between(i: Any, extent: int, results: int) -> tuple[Any, Any, Any]:
            a, b, d = self._ratio(extent, results)
            place = tirx.max(tirx.min(i * a + b, (extent - 1) * d), 0)
            first = tirx.floordiv(place, d)
            part = tirx.floormod(place, d).astype(wide) * tirx.const(1 / d, wide)
            return first, tirx.min(first + 1, extent - 1), part

        def element(*at: Any) -> Any:
            image, channel, i, j = at if self.layout == "nchw" else (at[0], at[3], at[1], at[2])
            if self.op == "nearest":
                return pixel(image, channel, self._nearest_te(i, self.h, self.rows), self._nearest_te(j, self.w, self.columns))
            top, bottom, down = between(i, self.h, self.rows)
            left, right, along = between(j, self.w, self.columns)
            upper, lower = (
                pixel(image, channel, row, left).astype(wide)
                + (pixel(image, channel, row, right).astype(wide) - pixel(image, channel, row, left).astype(wide)) * along
                for row in (top, bottom)
            )
            return (upper + (lower - upper) * down).astype(self.dtype)

        return [x, te.compute(out.shape, element, name="Y")]

    def _nearest_te(self, i: Any, extent: int, results: int) -> Any:
        from tvm import tirx

        a, b, d = self._ratio(extent, results)
        if self.coordinates == "asymmetric":
            return tirx.floordiv(i * a, d)
        return tirx.min(tirx.floordiv(2 * (i * a + b) + d, 2 * d), extent - 1)

    def reference(self, *inputs: Array) -> Array:
        x = inputs[0] if self.layout == "nchw" else inputs[0].transpose(0, 3, 1, 2)
        i, j = np.arange(self.rows), np.arange(self.columns)
        if self.op == "nearest":
            rows = np.minimum(self._nearest(i, self.h, self.rows), self.h - 1)
            columns = np.minimum(self._nearest(j, self.w, self.columns), self.w - 1)
            y = x[:, :, rows][..., columns]
        else:
            y = x.astype(np.float64)
            for axis, places, extent, results in ((2, i, self.h, self.rows), (3, j, self.w, self.columns)):
                a, b, d = self._ratio(extent, results)
                place = np.clip((places * a + b) / d, 0, extent - 1)
                first = np.floor(place).astype(np.intp)
                part = (place - first).reshape((-1, 1) if axis == 2 else -1)
                y = y.take(first, axis) * (1 - part) + y.take(np.minimum(first + 1, extent - 1), axis) * part
        return np.ascontiguousarray(y if self.layout == "nchw" else y.transpose(0, 2, 3, 1))

    def flops(self) -> int:
        """Return nothing for the nearest pixel, six operations for each result of a bilinear mean."""
        return 6 * self.n * self.rows * self.columns * self.c * (self.op == "bilinear")

    def takes_special_values(self) -> bool:
        """Say that a mean of four pixels, infinities among them, depends on which of its forms is computed."""
        return self.op == "nearest"

    def tolerance(self) -> float:
        """Return 0 where pixels are copied."""
        return 0.0 if self.op == "nearest" else super().tolerance()
