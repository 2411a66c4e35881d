"""Owns convolutions over any number of sides: attributes that their rules share, the computation in TE, and its reference in NumPy.

Knows nothing of tiles, targets or how a convolution is scheduled. A side is an axis along which windows move: width, height or depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from kerneldecl.arrays import Array, by_rows, random_array
from kerneldecl.lazy import np
from kerneldecl.model import dtype_bytes
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature, Size

from .epilogue import Epilogue, Step
from .precision import AccumDtype, OperandDtype, accum_dtype, accum_problems, accum_tolerance, largest_summand, out_dtype, reference_dtype

SIDE_NAMES = {1: ("columns",), 2: ("rows", "columns"), 3: ("planes", "rows", "columns")}
TAP_NAMES = {1: ("s",), 2: ("r", "s"), 3: ("q", "r", "s")}


@dataclass(frozen=True)
class Side:
    """One side of an image, and how windows move along it."""

    extent: int
    taps: int
    stride: int
    dilation: int
    before: int
    """Zeros before the first pixel."""
    after: int

    @property
    def padded(self) -> int:
        return self.extent + self.before + self.after

    @property
    def span(self) -> int:
        """Return the pixels from a window's first tap to its last."""
        return self.dilation * (self.taps - 1) + 1

    @property
    def outputs(self) -> int:
        """Return the windows along the side; 0 or fewer where none fits."""
        return (self.padded - self.span) // self.stride + 1

    def pixels_read(self) -> int:
        """Return how many pixels the windows read, without zeros around."""
        firsts = range(-self.before, self.outputs * self.stride - self.before, self.stride)
        return len({first + at * self.dilation for first in firsts for at in range(self.taps)} & set(range(self.extent)))


def _named(element: Callable[..., Any], sides: int, is_first: bool) -> Callable[..., Any]:
    """Return a function of a result's indices in the order of the layout. TE names axes by its parameters."""
    if is_first:
        orders: tuple[Callable[..., Any], ...] = (
            lambda image, f, column: element(image, f, column),  # noqa: PLW0108  TE reads the names
            lambda image, f, row, column: element(image, f, row, column),  # noqa: PLW0108
            lambda image, f, plane, row, column: element(image, f, plane, row, column),  # noqa: PLW0108
        )
    else:
        orders = (
            lambda image, column, f: element(image, f, column),
            lambda image, row, column, f: element(image, f, row, column),
            lambda image, plane, row, column, f: element(image, f, plane, row, column),
        )
    return orders[sides - 1]


@dataclass(frozen=True, kw_only=True)
class ConvolutionRule(Rule):
    """What rules of convolutions share; each adds the extents of its images and filters, and says which they are."""

    n: Extent
    """Images."""
    c: Extent
    """Input channels."""
    f: Extent
    """Output channels."""
    stride: Extent = 1
    """Step between outputs, the same along all sides."""
    padding: Size = 0
    """Zeros added before and after each side."""
    dilation: Extent = 1
    """Step between a filter's elements, the same along all sides."""
    strides: tuple[Extent, ...] = ()
    """Steps between outputs, one for each side, where they differ."""
    pads: tuple[Size, ...] = ()
    """Zeros before each side, then after each side, as in ONNX, where they differ: [top, left, bottom, right] of two sides."""
    dilations: tuple[Extent, ...] = ()
    """Steps between a filter's elements, one for each side, where they differ."""
    groups: Extent = 1
    """Groups of channels, each convolved by itself; c for a depthwise convolution."""
    dtype: OperandDtype = "float32"
    """Dtype of X and W."""
    accum_dtype: AccumDtype | Literal[""] = ""
    """Dtype of the accumulators and the epilogue; by default float32, int32 for integers, float64 for float64."""
    out_dtype: Dtype | Literal[""] = ""
    """Dtype of Y, the bias and the residual; by default dtype, int32 for integers."""
    epilogue: tuple[Step, ...] = ()
    """Steps in order: bias adds a vector [f], add an operand like Y, mul multiplies by one, scale and scale_columns by float32."""

    def extents(self) -> tuple[tuple[int, int], ...]:
        """Return pixels and taps of each side."""
        raise NotImplementedError

    @property
    def layout(self) -> str:
        """The order of the axes of X and Y, a letter each: nhwc."""
        raise NotImplementedError

    def panel_width(self) -> int:
        """Return the output channels of a panel of W; 0 where W is not in panels."""
        return 0

    @cached_property
    def _sides(self) -> tuple[Side, ...]:
        extents = self.extents()
        count = len(extents)
        strides = self.strides or (self.stride,) * count
        dilations = self.dilations or (self.dilation,) * count
        pads = self.pads or (self.padding,) * (2 * count)
        found = zip(extents, strides, dilations, pads[:count], pads[count:], strict=True)
        return tuple(Side(extent, taps, step, apart, *around) for (extent, taps), step, apart, *around in found)

    @property
    def _is_first(self) -> bool:
        """Say whether channels are behind the images, before the pixels."""
        return str(self.layout)[1] == "c"

    @property
    def _accum(self) -> str:
        return accum_dtype(self.dtype, self.accum_dtype)

    @cached_property
    def _epilogue(self) -> Epilogue:
        shape = self._image(self.n, self.f, tuple(side.outputs for side in self._sides))
        return Epilogue(self.epilogue, self._accum, Arg("Y", shape, out_dtype(self.dtype, self.out_dtype)), 1 if self._is_first else -1)

    @property
    def _terms(self) -> int:
        return math.prod(side.taps for side in self._sides) * (self.c // self.groups)

    def _image(self, image: Any, channel: Any, pixel: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return an index of X or Y, or a shape, in the layout."""
        return (image, channel, *pixel) if self._is_first else (image, *pixel, channel)

    def problems(self) -> Iterator[str]:
        count = len(self.extents())
        lists = (
            ("strides", self.strides, count, "stride"),
            ("dilations", self.dilations, count, "dilation"),
            ("pads", self.pads, 2 * count, "padding"),
        )
        wrong = [f"{name} has {len(given)} items; expected {wanted}" for name, given, wanted, _ in lists if given and len(given) != wanted]
        yield from wrong
        for name, given, _, one in lists:
            if given and getattr(self, one) != type(self).__dataclass_fields__[one].default:
                yield f"{name} and {one} are both given; {name} says it for every side"
        if wrong:
            return
        for name, side in zip(SIDE_NAMES[count], self._sides, strict=True):
            if side.outputs < 1:
                yield f"the kernel spans {side.span} {name}, but the padded image has {side.padded}; write a smaller kernel or more padding"
        if self.c % self.groups:
            yield f"groups {self.groups} does not divide c {self.c}; write a divisor"
        if self.f % self.groups:
            yield f"groups {self.groups} does not divide f {self.f}; write a divisor"
        yield from accum_problems(self.dtype, self._accum, self._epilogue.out.dtype)
        yield from self._epilogue.problems()

    def signature(self) -> Signature:
        x = Arg("X", self._image(self.n, self.c, tuple(side.extent for side in self._sides)), self.dtype)
        return Signature((x, Arg("W", self._weights_shape(), self.dtype), *self._epilogue.args()), (self._epilogue.out,))

    def _weights_shape(self) -> tuple[int, ...]:
        taps, channels, panel = tuple(side.taps for side in self._sides), self.c // self.groups, self.panel_width()
        if panel:
            return (self.f // panel, *taps, channels, panel)
        return (self.f, channels, *taps) if self._is_first else (*taps, channels, self.f)

    def _weight_index(self, taps: Sequence[Any], channel: Any, f: Any) -> tuple[Any, ...]:
        if panel := self.panel_width():
            return (f // panel, *taps, channel, f % panel)
        return (f, channel, *taps) if self._is_first else (*taps, channel, f)

    def lower(self) -> list[Any]:
        from tvm import te, topi

        x, w, *operands = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        before = list(self._image(0, 0, tuple(side.before for side in self._sides)))
        after = list(self._image(0, 0, tuple(side.after for side in self._sides)))
        padded = topi.nn.pad(x, before, after, name="padded")

        def element(image: Any, f: Any, *places: Any) -> Any:
            taps = [te.reduce_axis((0, side.taps), name) for side, name in zip(self._sides, TAP_NAMES[len(places)], strict=True)]
            c = te.reduce_axis((0, self.c // self.groups), "c")
            channel = c if self.groups == 1 else f // (self.f // self.groups) * (self.c // self.groups) + c
            pixel = [place * side.stride + tap * side.dilation for place, tap, side in zip(places, taps, self._sides, strict=True)]
            value = padded(*self._image(image, channel, tuple(pixel)))
            weight = w(*self._weight_index(taps, c, f))
            return te.sum(value.astype(self._accum) * weight.astype(self._accum), axis=[c, *taps] if self._is_first else [*taps, c])

        out, at = self._epilogue.out, _named(element, len(self._sides), self._is_first)
        return [*inputs, self._epilogue.lower(lambda name: te.compute(out.shape, at, name=name), operands)]

    def reference(self, *inputs: Array) -> Array:
        x, w, *operands = inputs
        out, panel = self._epilogue.out, self.panel_width()
        wide = reference_dtype(out.dtype, self.dtype)
        x = np.moveaxis(x, 1, -1) if self._is_first else x
        rows = np.moveaxis(w, (0, 1), (-1, -2)) if self._is_first else np.moveaxis(w, 0, -2) if panel else w
        weights = rows.astype(wide).reshape(self._terms, self.groups, -1).swapaxes(0, 1)
        pixels = tuple(side.outputs for side in self._sides)

        def images(part: slice) -> Array:
            found = self._im2col(x[part].astype(wide)) @ weights
            return found.swapaxes(0, 1).reshape(-1, *pixels, self.f)

        shape = (self.n, *pixels, self.f)
        accumulated = by_rows(np.empty(shape, wide), images, math.prod(pixels) * self._terms * self.groups)
        return self._epilogue.reference(np.moveaxis(accumulated, -1, 1) if self._is_first else accumulated, operands)

    def _im2col(self, x: Array) -> Array:
        """Return the im2col matrices [groups, outputs of all images, terms]: every pixel as often as the kernel reads it."""
        sides = self._sides
        padded = np.pad(x, ((0, 0), *((side.before, side.after) for side in sides), (0, 0)))
        padded = padded.reshape(len(x), *(side.padded for side in sides), self.groups, -1)
        image, *pixel, group, channel = padded.strides
        steps = [step * side.stride for step, side in zip(pixel, sides, strict=True)]
        steps += [step * side.dilation for step, side in zip(pixel, sides, strict=True)]
        extents = [*(side.outputs for side in sides), *(side.taps for side in sides)]
        shape = (self.groups, len(x), *extents, self.c // self.groups)
        columns = np.lib.stride_tricks.as_strided(padded, shape, (group, image, *steps, channel), writeable=False)
        return columns.reshape(self.groups, -1, self._terms)

    def flops(self) -> int:
        """Return the operations, those on padding included."""
        return math.prod(self._epilogue.out.shape) * (2 * self._terms + self._epilogue.flops_per_element())

    def least_bytes(self) -> int:
        """Return the bytes that must move, without those of pixels that a stride or a dilation skips."""
        read = math.prod(side.pixels_read() for side in self._sides)
        skipped = self.n * (math.prod(side.extent for side in self._sides) - read) * self.c
        return super().least_bytes() - skipped * dtype_bytes(self.dtype)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return weights with which results have unit variance."""
        x, w, *_ = self.signature().inputs
        weights = random_array(rng, w, 1 / math.sqrt(self._terms))
        return [random_array(rng, x), weights, *self._epilogue.inputs(rng, self._terms, self.dtype)]

    def largest_input(self) -> float:
        return largest_summand(self._accum, self.c)

    def tolerance(self) -> float:
        return accum_tolerance(self._epilogue.out.dtype, self._accum, self._terms, self.dtype)
