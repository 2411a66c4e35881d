"""Owns a kernel of convolutions on CPUs that copies its operands to where they are read fast: register tiles of pixels by output channels.

Knows nothing of how its parameters are chosen or of how a function is recognised.

Transposed convolutions have phases, others one. A result's phase is its place modulo the stride: results of one phase see the same taps,
each a pixel further. So a row of one phase is a convolution of stride 1 with every stride-th tap, whose results lie a stride apart. Taps
that a phase does not have are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import CpuPhasedConvParams
from kerneldecl.templates.cpu.splice import Element, Splice
from kerneldecl.templates.cpu.vectors import loop, parallel, variable

Index = Sequence[Any]


class Side(NamedTuple):
    """Rows or columns: how results see taps."""

    results: int
    taps: int
    offset: int
    """What is added to a result's place before it is divided by the number of phases."""
    step: int
    """Pixels from one result of a phase to the next."""
    first: int
    """Pixels from a result's place to its first tap."""
    apart: int
    """Pixels from a tap of a phase to the next."""


@dataclass(frozen=True)
class PhasedConv:
    """Y = epilogue(conv2d(X, W)), or of a transposed convolution, as it was read from a function."""

    args: tuple[Any, ...]
    """Buffers of the function, X, W and Y among them."""
    images: int
    rows: Side
    columns: Side
    stride: int
    """Phases of each side: the stride of a transposed convolution; 1 of others."""
    channels: int
    f: int
    accum: str
    padded: tuple[int, int]
    """Rows and columns of an image with zeros around."""
    pixel: Element
    """Of an image, a row and a column with zeros around, and a channel."""
    weight: Element
    """Of a tap's row and column, an input and an output channel."""
    sums: Any
    """The buffer that the results are read from before the epilogue."""
    result: Element
    """Of an image, a row, a column and an output channel: Y's element."""
    place: tuple[Any, ...]
    """Indices of Y, of the result's axes."""

    def direct(self, element: Element) -> Any | None:
        """Return the argument that holds an element at its own indices in the accumulators' dtype; None where it has to be copied."""
        value = element.value
        if not isinstance(value, TensorLoad) or str(value.source.ty.dtype) != self.accum or len(value.indices) != len(element.axes):
            return None
        is_plain = all(index.same_as(axis) for index, axis in zip(value.indices, element.axes, strict=True))
        return value.source if is_plain else None


@dataclass(frozen=True)
class Kernel:
    """One kernel, while it is written."""

    conv: PhasedConv
    params: CpuPhasedConvParams
    lanes: int
    splice: Splice

    @property
    def width(self) -> int:
        """Return the output channels of a register tile."""
        return min(self.params.vectors, self.conv.f // self.lanes) * self.lanes

    @property
    def panels(self) -> int:
        return -(-self.conv.f // self.width)

    @property
    def tile_w(self) -> int:
        """Return the pixels of a register tile: no more than the phase with the fewest has."""
        counts: list[int] = [_count(self.conv.columns, phase, self.conv.stride) for phase in range(self.conv.stride)]
        return min(self.params.tile_w, *(count for count in counts if count > 0))

    def first_channel(self, panel: Any) -> Any:
        """Return the first output channel of a panel: the last one begins earlier, so that it is whole."""
        return tirx.min(panel * self.width, T.int64(self.conv.f - self.width))

    def element(self, element: Element, index: Index) -> Any:
        """Return an element in the dtype of the accumulators."""
        return self.splice.of(element, index).astype(self.conv.accum)


def build(conv: PhasedConv, params: CpuPhasedConvParams, lanes: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, with vectors of so many accumulators."""
    lanes = min(lanes, 1 << (conv.f.bit_length() - 1))
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = tuple(T.arg(f"arg{at}", T.Buffer(tuple(each.ty.shape), str(each.ty.dtype))) for at, each in enumerate(conv.args))
        kernel = Kernel(conv, params, lanes, Splice(conv.args, args, conv.sums))
        operands = _image(kernel), _weights(kernel)
        blocks = -(-max(_counts(conv)) // params.block_h)
        parts = -(-kernel.panels // params.panels)
        with parallel(conv.images * blocks * conv.stride * parts) as task:
            part, phase = T.bind(task % parts), T.bind(task // parts % conv.stride)
            block, image = T.bind(task // (parts * conv.stride) % blocks), T.bind(task // (parts * conv.stride * blocks))
            first = T.bind(part * params.panels)
            with loop(tirx.min(T.int64(params.panels), kernel.panels - first)) as panel:
                _rows(kernel, operands, (image, phase, block), T.bind(first + panel))
    return tvm.IRModule({"main": builder.get()})


def _count(side: Side, phase: Any, stride: int) -> Any:
    """Return the results of a phase."""
    return (side.results - 1 - (phase - side.offset) % stride) // stride + 1


def _counts(conv: PhasedConv) -> list[int]:
    return [_count(conv.rows, phase, conv.stride) for phase in range(conv.stride)]


def _image(kernel: Kernel) -> Callable[..., Any]:
    """Return how pixels with zeros around are read: from a copy, unless X is what is read."""
    conv = kernel.conv
    source = conv.direct(conv.pixel)
    if source is not None:
        return lambda *index: kernel.splice.expr(source[index], {})
    rows, columns = conv.padded
    copy = T.alloc_buffer((conv.images, rows, columns, conv.channels), conv.accum)
    lanes = math.gcd(kernel.lanes, conv.channels)
    with parallel(conv.images * rows) as task, loop(columns) as column:
        image, row = T.bind(task // rows), T.bind(task % rows)
        with loop(conv.channels // lanes) as group, _lanes(lanes) as lane:
            index = (image, row, column, group * lanes + lane)
            T.buffer_store(copy, kernel.element(conv.pixel, index), list(index))
    return lambda *index: copy[index]


def _weights(kernel: Kernel) -> Callable[..., Any]:
    """Return how a vector of weights of a panel is read: from a copy in panels, or from W."""
    conv = kernel.conv
    source = conv.direct(conv.weight)
    if source is not None and not kernel.params.pack:

        def read(panel: Any, row: Any, column: Any, channel: Any, at: int) -> Any:
            channels = _ramp(kernel.first_channel(panel) + at, kernel.lanes)
            return kernel.splice.expr(source[row, column, channel, channels], {})

        return read
    taps = conv.rows.taps, conv.columns.taps
    panels = T.alloc_buffer((kernel.panels, *taps, conv.channels, kernel.width), conv.accum)
    # All taps of an input and an output channel lie together where channels come first: they are read once.
    with parallel(kernel.panels * conv.channels) as task, loop(taps[0]) as row, loop(taps[1]) as column:
        panel, channel = T.bind(task // conv.channels), T.bind(task % conv.channels)
        with loop(kernel.width // kernel.lanes) as vector, _lanes(kernel.lanes) as lane:
            at = vector * kernel.lanes + lane
            value = kernel.element(conv.weight, (row, column, channel, kernel.first_channel(panel) + at))
            T.buffer_store(panels, value, [panel, row, column, channel, at])
    return lambda panel, row, column, channel, at: panels[panel, row, column, channel, _ramp(at, kernel.lanes)]


def _rows(kernel: Kernel, operands: tuple[Any, Any], task: tuple[Any, Any, Any], panel: Any) -> None:
    """Compute a task's rows, which are of one phase, of a panel: columns of one phase after those of another."""
    conv, stride = kernel.conv, kernel.conv.stride
    image, down, block = task
    first_row = T.bind((down - conv.rows.offset + stride) % stride)
    begin = T.bind(block * kernel.params.block_h)
    rows = T.bind((conv.rows.results - 1 - first_row + stride) // stride)
    with loop(stride) as along:
        first_column = T.bind((along - conv.columns.offset + stride) % stride)
        columns = T.bind((conv.columns.results - 1 - first_column + stride) // stride)
        with loop(tirx.max(tirx.min(T.int64(kernel.params.block_h), rows - begin), T.int64(0))) as at:
            y = T.bind(first_row + (begin + at) * stride)
            with loop((columns + kernel.tile_w - 1) // kernel.tile_w) as tile:
                # The last tile begins earlier, so that it is whole.
                start = tirx.min(tile * kernel.tile_w, columns - kernel.tile_w)
                x = T.bind(first_column + start * stride)
                _tile(kernel, operands, (image, y, x), (down, along, panel))


def _tile(kernel: Kernel, operands: tuple[Any, Any], at: tuple[Any, Any, Any], phase: tuple[Any, Any, Any]) -> None:
    """Compute a register tile: results of a row that lie a stride apart, from the one at (image, y, x) on."""
    conv, lanes, stride = kernel.conv, kernel.lanes, kernel.conv.stride
    pixels, weights = operands
    image, y, x = at
    down, along, panel = phase
    places = range(0, kernel.width, lanes)
    sums = [variable(kernel.width, conv.accum) for _ in range(kernel.tile_w)]
    for total in sums:
        for vector in places:
            T.buffer_store(total, _spread(tirx.const(0, conv.accum), lanes), [_ramp(vector, lanes)])
    row, column = T.bind((y + conv.rows.offset) // stride), T.bind((x + conv.columns.offset) // stride)
    with _taps(conv.rows, down, stride) as r, _taps(conv.columns, along, stride) as s:
        tap = T.bind(down + r * stride), T.bind(along + s * stride)
        top = T.bind(row * conv.rows.step + conv.rows.first + r * conv.rows.apart)
        left = T.bind(column * conv.columns.step + conv.columns.first + s * conv.columns.apart)
        with loop(conv.channels) as c:
            held = []
            for vector in places:
                held.append(variable(lanes, conv.accum))
                T.buffer_store(held[-1], weights(panel, *tap, c, vector), [_ramp(0, lanes)])
            for number, total in enumerate(sums):
                factor = variable(lanes, conv.accum)
                T.buffer_store(factor, _spread(pixels(image, top, left + number * conv.columns.step, c), lanes), [_ramp(0, lanes)])
                for vector, each in zip(places, held, strict=True):
                    added = total[_ramp(vector, lanes)] + each[_ramp(0, lanes)] * factor[_ramp(0, lanes)]
                    T.buffer_store(total, added, [_ramp(vector, lanes)])
    channel = T.bind(kernel.first_channel(panel))
    for number, total in enumerate(sums):
        for vector in places:
            _store(kernel, (image, y, x + number * stride, channel + vector), total, vector)


def _store(kernel: Kernel, at: Index, total: Any, first: int) -> None:
    """Store a vector of results, from the channel of the place on, after the epilogue."""
    conv = kernel.conv
    with _lanes(kernel.lanes) as lane:
        values = dict(zip(conv.result.axes, (*at[:-1], at[-1] + T.int64(1) * lane), strict=True))
        value = kernel.splice.expr(conv.result.value, values, total[first + lane])
        T.buffer_store(kernel.splice.args[-1], value, [kernel.splice.expr(each, values) for each in conv.place])


def _taps(side: Side, phase: Any, stride: int) -> Any:
    """Return the frame of a loop over the taps of a phase; some phases have one less, or none."""
    return loop((side.taps - 1 - phase + stride) // stride)


def _ramp(first: Any, lanes: int) -> Any:
    """Return the indices of a vector; of one element, its index."""
    first = T.int64(first) if isinstance(first, int) else first
    return tirx.Ramp(first, T.int64(1), lanes) if lanes > 1 else first


def _spread(value: Any, lanes: int) -> Any:
    return tirx.Broadcast(value, lanes) if lanes > 1 else value


def _lanes(lanes: int) -> Any:
    """Return the frame of a loop over the elements of a vector."""
    return T.vectorized(lanes) if lanes > 1 else loop(1)
