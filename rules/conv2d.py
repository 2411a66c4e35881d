"""Owns the two-dimensional convolution of NHWC images with HWIO weights, with an optional epilogue in the same kernel.

Knows nothing of tiles, targets or how the convolution is scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, by_rows, random_array
from kerneldecl.lazy import np
from kerneldecl.model import dtype_bytes
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature, Size

from .shared.epilogue import Epilogue, Step
from .shared.precision import AccumDtype, OperandDtype, accum_dtype, accum_problems, accum_tolerance, out_dtype, reference_dtype


@dataclass(frozen=True, kw_only=True)
class Conv2d(Rule):
    """Y = epilogue(conv2d(X, W)): X is [n, h, w, c], W is [kh, kw, c / groups, f], Y is [n, rows, columns, f]."""

    n: Extent
    """Images."""
    h: Extent
    """Rows of an image."""
    w: Extent
    """Columns of an image."""
    c: Extent
    """Input channels."""
    f: Extent
    """Output channels."""
    kh: Extent
    """Rows of the kernel."""
    kw: Extent
    """Columns of the kernel."""
    stride: Extent = 1
    """Step between outputs, in both directions."""
    padding: Size = 0
    """Zeros added on each of the four sides."""
    dilation: Extent = 1
    """Step between the kernel's elements, in both directions."""
    groups: Extent = 1
    """Groups of channels, each convolved by itself; c for a depthwise convolution."""
    panel: Size = 0
    """Output channels of a panel, where W is [f / panel, kh, kw, c / groups, panel]; 0 where it is not in panels."""
    dtype: OperandDtype = "float32"
    """Dtype of X and W."""
    accum_dtype: AccumDtype | Literal[""] = ""
    """Dtype of the accumulators and the epilogue; by default float32, int32 for integers, float64 for float64."""
    out_dtype: Dtype | Literal[""] = ""
    """Dtype of Y, the bias and the residual; by default dtype, int32 for integers."""
    epilogue: tuple[Step, ...] = ()
    """Steps in order: bias adds a vector [f], add an operand like Y, mul multiplies by one, scale and scale_columns by float32."""

    @property
    def _accum(self) -> str:
        return accum_dtype(self.dtype, self.accum_dtype)

    @property
    def _epilogue(self) -> Epilogue:
        rows, columns = self._outputs(self.h, self.kh), self._outputs(self.w, self.kw)
        y = Arg("Y", (self.n, rows, columns, self.f), out_dtype(self.dtype, self.out_dtype))
        return Epilogue(self.epilogue, self._accum, y)

    @property
    def _terms(self) -> int:
        return self.kh * self.kw * (self.c // self.groups)

    def _outputs(self, image: int, kernel: int) -> int:
        """Return the outputs along one side of an image; 0 or fewer where the kernel does not fit."""
        return (image + 2 * self.padding - self.dilation * (kernel - 1) - 1) // self.stride + 1

    def problems(self) -> Iterator[str]:
        for side, image, kernel in (("rows", self.h, self.kh), ("columns", self.w, self.kw)):
            if self._outputs(image, kernel) < 1:
                extent = self.dilation * (kernel - 1) + 1
                yield f"the kernel spans {extent} {side}, but the padded image has {image + 2 * self.padding}"
        if self.c % self.groups:
            yield f"groups {self.groups} does not divide c {self.c}"
        if self.f % self.groups:
            yield f"groups {self.groups} does not divide f {self.f}"
        if self.panel and self.f % self.panel:
            yield f"panel {self.panel} does not divide f {self.f}"
        yield from accum_problems(self.dtype, self._accum, self._epilogue.out.dtype)
        yield from self._epilogue.problems()

    def signature(self) -> Signature:
        x = Arg("X", (self.n, self.h, self.w, self.c), self.dtype)
        taps = (self.kh, self.kw, self.c // self.groups)
        w = Arg("W", (self.f // self.panel, *taps, self.panel) if self.panel else (*taps, self.f), self.dtype)
        return Signature((x, w, *self._epilogue.args()), (self._epilogue.out,))

    def lower(self) -> list[Any]:
        from tvm import te, topi

        x, w, *operands = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        margin = [0, self.padding, self.padding, 0]
        padded = topi.nn.pad(x, margin, margin, name="padded")

        def element(image: Any, row: Any, column: Any, f: Any) -> Any:
            r, s = te.reduce_axis((0, self.kh), "r"), te.reduce_axis((0, self.kw), "s")
            c = te.reduce_axis((0, self.c // self.groups), "c")
            channel = c if self.groups == 1 else f // (self.f // self.groups) * (self.c // self.groups) + c
            pixel = padded(image, row * self.stride + r * self.dilation, column * self.stride + s * self.dilation, channel)
            weight = w(f // self.panel, r, s, c, f % self.panel) if self.panel else w(r, s, c, f)
            return te.sum(pixel.astype(self._accum) * weight.astype(self._accum), axis=[r, s, c])

        out = self._epilogue.out
        return [*inputs, self._epilogue.lower(lambda name: te.compute(out.shape, element, name=name), operands)]

    def reference(self, *inputs: Array) -> Array:
        x, w, *operands = inputs
        out = self._epilogue.out
        wide = reference_dtype(out.dtype, self.dtype)
        rows = w.transpose(1, 2, 3, 0, 4) if self.panel else w
        weights = rows.astype(wide).reshape(self._terms, self.groups, -1).swapaxes(0, 1)

        def images(part: slice) -> Array:
            found = self._im2col(x[part].astype(wide)) @ weights
            return found.swapaxes(0, 1).reshape(-1, *out.shape[1:])

        accumulated = by_rows(np.empty(out.shape, wide), images, math.prod(out.shape[1:3]) * self._terms * self.groups)
        return self._epilogue.reference(accumulated, operands)

    def _im2col(self, x: Array) -> Array:
        """Return the im2col matrices [groups, outputs of all images, terms]: every pixel as often as the kernel reads it."""
        p, (_, rows, columns, _) = self.padding, self._epilogue.out.shape
        padded = np.pad(x, ((0, 0), (p, p), (p, p), (0, 0))).reshape(len(x), self.h + 2 * p, self.w + 2 * p, self.groups, -1)
        image, row, column, group, channel = padded.strides
        steps = (row * self.stride, column * self.stride, row * self.dilation, column * self.dilation)
        shape = (self.groups, len(x), rows, columns, self.kh, self.kw, self.c // self.groups)
        columns_of_outputs = np.lib.stride_tricks.as_strided(padded, shape, (group, image, *steps, channel), writeable=False)
        return columns_of_outputs.reshape(self.groups, -1, self._terms)

    def flops(self) -> int:
        """Return the operations, those on padding included."""
        return math.prod(self._epilogue.out.shape) * (2 * self._terms + self._epilogue.flops_per_element())

    def least_bytes(self) -> int:
        """Return the bytes that must move, without those of pixels that a stride or a dilation skips."""
        read = self._pixels_read(self.h, self.kh) * self._pixels_read(self.w, self.kw)
        skipped = self.n * (self.h * self.w - read) * self.c
        return super().least_bytes() - skipped * dtype_bytes(self.dtype)

    def _pixels_read(self, image: int, kernel: int) -> int:
        """Return how many pixels along one side of an image the kernel reads."""
        firsts = range(-self.padding, self._outputs(image, kernel) * self.stride - self.padding, self.stride)
        return len({first + at * self.dilation for first in firsts for at in range(kernel)} & set(range(image)))

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return weights with which results have unit variance."""
        x, w, *_ = self.signature().inputs
        weights = random_array(rng, w, 1 / math.sqrt(self._terms))
        return [random_array(rng, x), weights, *self._epilogue.inputs(rng, self._terms, self.dtype)]

    def tolerance(self) -> float:
        return accum_tolerance(self._epilogue.out.dtype, self._accum, self._terms, self.dtype)
