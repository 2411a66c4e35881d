"""Owns the transposed convolution of images, which upsamples: the gradient of conv2d with respect to its image.

Knows nothing of tiles, targets or how it is scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from kerneldecl.arrays import Array, random_array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature, Size

from .shared.epilogue import Epilogue, Step
from .shared.precision import AccumDtype, OperandDtype, accum_dtype, accum_problems, accum_tolerance, out_dtype, reference_dtype


class _Phases(NamedTuple):
    """How one side is convolved for all phases at once."""

    results: int
    """Results of each phase."""
    taps: int
    """Taps of each phase at most."""
    before: int
    """Zeros before the first pixel."""
    after: int


@dataclass(frozen=True, kw_only=True)
class Conv2dTranspose(Rule):
    """Y = epilogue(conv_transpose2d(X, W)): X[i] * W[r] is added to Y[i * stride + r - padding]; W is [kh, kw, c, f]."""

    n: Extent
    """Images."""
    h: Extent
    """Rows of an image of X."""
    w: Extent
    """Columns of an image of X."""
    c: Extent
    """Input channels."""
    f: Extent
    """Output channels."""
    kh: Extent
    """Rows of the kernel."""
    kw: Extent
    """Columns of the kernel."""
    stride: Extent = 1
    """Pixels of Y from one pixel of X to the next, in both directions."""
    padding: Size = 0
    """Pixels of the full result that are left out on each of the four sides."""
    extra: Size = 0
    """Rows and columns added at the bottom and at the right (output_padding in torch), fewer than the stride."""
    layout: Literal["nhwc", "nchw"] = "nhwc"
    """Order of the axes of X and Y; W is [c, f, kh, kw] with nchw, as in torch."""
    dtype: OperandDtype = "float32"
    """Dtype of X and W."""
    accum_dtype: AccumDtype | Literal[""] = ""
    """Dtype of the accumulators and the epilogue; by default float32, int32 for integers, float64 for float64."""
    out_dtype: Dtype | Literal[""] = ""
    """Dtype of Y, the bias and the residual; by default dtype, int32 for integers."""
    epilogue: tuple[Step, ...] = ()
    """Steps in order: bias adds a vector [f], add an operand like Y, mul multiplies by one, scale and scale_columns by float32."""

    @property
    def _is_first(self) -> bool:
        return self.layout == "nchw"

    @property
    def _accum(self) -> str:
        return accum_dtype(self.dtype, self.accum_dtype)

    @property
    def _pixels(self) -> tuple[int, int]:
        """Return rows and columns of Y."""
        return self._results(self.h, self.kh), self._results(self.w, self.kw)

    def _results(self, side: int, taps: int) -> int:
        return (side - 1) * self.stride - 2 * self.padding + taps + self.extra

    @cached_property
    def _epilogue(self) -> Epilogue:
        shape = (self.n, self.f, *self._pixels) if self._is_first else (self.n, *self._pixels, self.f)
        return Epilogue(self.epilogue, self._accum, Arg("Y", shape, out_dtype(self.dtype, self.out_dtype)), 1 if self._is_first else -1)

    @property
    def _terms(self) -> int:
        """Return the products that are added to one pixel at most."""
        return self.c * math.prod(-(-taps // self.stride) for taps in (self.kh, self.kw))

    def problems(self) -> Iterator[str]:
        for name, extent in zip(("rows", "columns"), self._pixels, strict=True):
            if extent < 1:
                yield f"padding {self.padding} leaves {extent} {name} of the result; write less padding"
        if self.padding >= min(self.kh, self.kw):
            yield f"padding {self.padding} is not less than the kernel, {self.kh} x {self.kw}: pixels would count for nothing; write less"
        if self.extra >= self.stride:
            yield f"extra {self.extra} is not less than the stride, {self.stride}; write less"
        yield from accum_problems(self.dtype, self._accum, self._epilogue.out.dtype)
        yield from self._epilogue.problems()

    def signature(self) -> Signature:
        x = (self.n, self.c, self.h, self.w) if self._is_first else (self.n, self.h, self.w, self.c)
        w = (self.c, self.f, self.kh, self.kw) if self._is_first else (self.kh, self.kw, self.c, self.f)
        return Signature((Arg("X", x, self.dtype), Arg("W", w, self.dtype), *self._epilogue.args()), (self._epilogue.out,))

    def lower(self) -> list[Any]:
        """Return a convolution of stride 1 whose filters are those of all phases, and the results put in their places.

        Pixels of Y whose places differ by the stride are of one phase: they are convolved with every stride-th tap. So no product with
        a zero between pixels is computed; only taps that the stride does not divide are filled up with zeros.
        """
        from tvm import te

        x, w, *operands = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        rows, columns = self._phases(self.h, self.kh), self._phases(self.w, self.kw)
        padded, taps = self._padded(x, w, rows, columns)
        step, f = self.stride, self.f

        def element(image: Any, i: Any, j: Any, down: Any, along: Any, channel: Any) -> Any:
            r, s, c = (te.reduce_axis((0, extent), name) for extent, name in ((rows.taps, "r"), (columns.taps, "s"), (self.c, "c")))
            pixel = padded(image, i + r, j + s, c)
            weight = taps(down + (rows.taps - 1 - r) * step, along + (columns.taps - 1 - s) * step, c, channel)
            return te.sum(pixel.astype(self._accum) * weight.astype(self._accum), axis=[r, s, c])

        phases = te.compute((self.n, rows.results, columns.results, step, step, f), element, name="phases")

        def place(name: str) -> Any:
            def at(*index: Any) -> Any:
                image, channel, y, x = index if self._is_first else (index[0], index[3], index[1], index[2])
                down, along = y + self.padding % step, x + self.padding % step
                return phases(image, down // step, along // step, down % step, along % step, channel)

            return te.compute(self._epilogue.out.shape, at, name=name)

        return [*inputs, self._epilogue.lower(place, operands)]

    def _phases(self, side: int, taps: int) -> _Phases:
        """Return how a side is convolved for all phases at once."""
        most, first = -(-taps // self.stride), self.padding // self.stride
        results = (self.padding % self.stride + self._results(side, taps) - 1) // self.stride + 1
        return _Phases(results, most, most - 1 - first, max(0, results + first - side))

    def _padded(self, x: Any, w: Any, rows: _Phases, columns: _Phases) -> tuple[Any, Any]:
        """Return X, channels last, with zeros around, and W as [taps, taps, c, f] with zeros up to multiples of the stride."""
        from tvm import te, topi

        if self._is_first:
            image, filters = x, w
            x = te.compute((self.n, self.h, self.w, self.c), lambda n, i, j, c: image(n, c, i, j), name="image")
            w = te.compute((self.kh, self.kw, self.c, self.f), lambda r, s, c, f: filters(c, f, r, s), name="filters")
        padded = topi.nn.pad(x, [0, rows.before, columns.before, 0], [0, rows.after, columns.after, 0], name="padded")
        missing = [rows.taps * self.stride - self.kh, columns.taps * self.stride - self.kw, 0, 0]
        return padded, topi.nn.pad(w, [0] * 4, missing, name="taps") if any(missing) else w

    def reference(self, *inputs: Array) -> Array:
        x, w, *operands = inputs
        wide = reference_dtype(self._epilogue.out.dtype, self.dtype)
        x = (x if self._is_first else x.transpose(0, 3, 1, 2)).astype(wide)
        w = (w.transpose(2, 3, 0, 1) if self._is_first else w).astype(wide)
        rows, columns = self._pixels
        p, step = self.padding, self.stride
        full = np.zeros((self.n, self.f, rows + 2 * p, columns + 2 * p), wide)
        pixels = x.reshape(self.n, self.c, -1).swapaxes(1, 2)
        for r in range(self.kh):
            for s in range(self.kw):
                part = (pixels @ w[r, s]).swapaxes(1, 2).reshape(self.n, self.f, self.h, self.w)
                full[:, :, r : r + self.h * step : step, s : s + self.w * step : step] += part
        y = full[:, :, p : p + rows, p : p + columns]
        return self._epilogue.reference(y if self._is_first else y.transpose(0, 2, 3, 1), operands)

    def flops(self) -> int:
        """Return the operations of every pixel of X with every weight, those that are left out included."""
        return 2 * self.n * self.h * self.w * self.c * self.kh * self.kw * self.f + (
            math.prod(self._epilogue.out.shape) * self._epilogue.flops_per_element()
        )

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return weights with which results have about unit variance."""
        x, w, *_ = self.signature().inputs
        return [
            random_array(rng, x),
            random_array(rng, w, 1 / math.sqrt(self._terms)),
            *self._epilogue.inputs(rng, self._terms, self.dtype),
        ]

    def takes_special_values(self) -> bool:
        """Say that zeros between pixels meet weights that are infinite or no number in some kernels, and are left out by others."""
        return False

    def tolerance(self) -> float:
        return accum_tolerance(self._epilogue.out.dtype, self._accum, self.c * self.kh * self.kw, self.dtype)
