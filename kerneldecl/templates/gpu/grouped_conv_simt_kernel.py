"""Owns the kernel of convolutions in groups on CUDA cores: threads that compute strips of pixels by a few channels out of shared memory.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.grouped_conv import GroupedConvSizes
from kerneldecl.analysis.grouped_conv_params import ConvTile, GroupedConvSimtParams
from kerneldecl.templates.gpu.grouped_conv_config import sizes_of
from kerneldecl.templates.gpu.grouped_conv_copy import Copies, Place, copy_operands, flat, place_of, result_index
from kerneldecl.templates.gpu.grouped_conv_launch import launched
from kerneldecl.templates.hopper.read_conv import Convolution


@dataclass(frozen=True)
class GroupedConvSimtKernel:
    """One kernel: a thread block computes a rectangle of pixels of one image, for the filters of some groups."""

    convolution: Convolution
    params: GroupedConvSimtParams
    has_pdl: bool
    is_async: bool = True
    """Whether operands are copied by cp.async."""

    @functools.cached_property
    def sizes(self) -> GroupedConvSizes:
        return sizes_of(self.convolution)

    @functools.cached_property
    def tile(self) -> ConvTile:
        return self.params.tile(self.sizes)

    @property
    def depth(self) -> int:
        return self.params.depth(self.sizes)

    @property
    def chunks(self) -> int:
        """Return how often a thread loads input channels of a pixel."""
        return 1 if self.sizes.is_depthwise else self.sizes.channels // self.depth

    @functools.cached_property
    def pixels(self) -> list[int]:
        """Return which pixels of a row a strip's windows see, counted from the first one."""
        columns = self.sizes.columns
        return sorted({p * columns.stride + s * columns.dilation for p in range(self.params.strip) for s in range(columns.taps)})

    def offset(self, pixel: int) -> int:
        """Return how far a pixel is from the first of its strip, in pixels of shared memory."""
        stride = self.sizes.columns.stride
        return pixel % stride * (self.tile.line // stride) + pixel // stride


class Thread(NamedTuple):
    """A thread's view of the kernel, while its script is read."""

    kernel: GroupedConvSimtKernel
    image: Any
    weights: Any
    place: Place


class Registers(NamedTuple):
    """Registers of a thread."""

    sums: Any
    """Of each pixel of a strip, its channels."""
    pixels: Any
    factors: Any
    """Weights of one term."""
    loaded: Any
    """One vector as it was loaded."""
    results: Any


class Strip(NamedTuple):
    """A strip of results: row and first column in the thread block's rectangle, and which vector of its channels."""

    row: Any
    column: Any
    vector: Any


def _registers(kernel: GroupedConvSimtKernel) -> Registers:
    params, sizes = kernel.params, kernel.sizes
    return Registers(
        sums=T.alloc_local((params.strip * params.width,), "float32"),
        pixels=T.alloc_local((len(kernel.pixels) * kernel.depth,), "float32"),
        factors=T.alloc_local((params.width,), "float32"),
        loaded=T.alloc_local((max(kernel.depth, params.width),), sizes.dtype),
        results=T.alloc_local((params.width,), sizes.out_dtype),
    )


@T.inline
def _load(registers, to, first, source, width):
    """Load neighbouring elements from shared memory, and widen them; `source` is a function from the number of each."""
    for v in T.vectorized(width):
        registers.loaded[v] = source(v)
    for v in T.unroll(width):
        to[first + v] = T.cast(registers.loaded[v], "float32")


def _image_source(thread: Thread, begin: Any) -> Callable[[Any], Any]:
    return lambda v: thread.image[begin + v]


def _weight_source(thread: Thread, term: Any, vector: Any) -> Callable[[Any], Any]:
    return lambda v: thread.weights[term, vector * thread.kernel.params.width + v]


def _load_pixels(thread: Thread, registers: Registers, strip: Strip, at: tuple[Any, Any]) -> None:
    """Load some channels of the pixels of one row that a strip's windows see; `at` is the tap's row and the chunk of channels."""
    kernel, tile, sizes = thread.kernel, thread.kernel.tile, thread.kernel.sizes
    width = kernel.params.width
    line = strip.row * sizes.rows.stride + at[0] * sizes.rows.dilation
    group = 0 if tile.block_n <= sizes.filters else strip.vector * width // sizes.filters
    channel = strip.vector * width if sizes.is_depthwise else group * sizes.channels + at[1] * kernel.depth
    begin = (line * tile.line + strip.column) * tile.pitch + channel
    for number, pixel in enumerate(kernel.pixels):
        source = _image_source(thread, begin + kernel.offset(pixel) * tile.pitch)
        _load(registers, registers.pixels, number * kernel.depth, source, kernel.depth)


def _add_products(thread: Thread, registers: Registers, vector: Any, at: tuple[Any, Any]) -> None:
    """Multiply the loaded pixels by the weights of one row of taps and one chunk of channels."""
    kernel, sizes, width = thread.kernel, thread.kernel.sizes, thread.kernel.params.width
    place = {pixel: number for number, pixel in enumerate(kernel.pixels)}
    for s in range(sizes.columns.taps):
        for c in range(1 if sizes.is_depthwise else kernel.depth):
            term = (at[0] * sizes.columns.taps + s) * sizes.channels + at[1] * kernel.depth + c
            _load(registers, registers.factors, 0, _weight_source(thread, term, vector), width)
            for p in range(kernel.params.strip):
                pixel = place[p * sizes.columns.stride + s * sizes.columns.dilation] * kernel.depth
                for v in range(width):
                    x = registers.pixels[pixel + (v if sizes.is_depthwise else c)]
                    total = registers.sums[p * width + v]
                    T.buffer_store(registers.sums, total + x * registers.factors[v], [p * width + v])


def _compute_results(thread: Thread, registers: Registers, pixel: tuple[Any, Any, Any], filters: Any, p: int) -> None:
    """Compute the results of one pixel from its sums."""
    convolution, width = thread.kernel.convolution, thread.kernel.params.width
    for v in range(width):
        index = result_index(thread.kernel.tile, pixel, filters + v)
        total = registers.sums[p * width + v]
        T.buffer_store(registers.results, convolution.value(total, index, convolution.aux(index)), [v])


@T.inline
def _store(thread, registers, strip, out, at):
    """Store the results of one pixel of a strip, if the image has it; `at` is which one, and the first that no other strip has."""
    kernel, sizes, place = T.meta_var((thread.kernel, thread.kernel.sizes, thread.place))
    p, first = T.meta_var(at)
    y, x = T.meta_var((place.row + strip.row, place.column + strip.column + p))
    if T.And(T.And(y < sizes.rows.results, x < sizes.columns.results), p >= first):
        filters = T.meta_var(place.filters * kernel.params.block_n + strip.vector * kernel.params.width)
        _compute_results(thread, registers, (place.image, y, x), filters, p)
        begin: T.let = ((place.image * sizes.rows.results + y) * sizes.columns.results + x) * kernel.convolution.filters + filters
        for v in T.vectorized(kernel.params.width):
            out[begin + v] = registers.results[v]


def _store_all(thread: Thread, registers: Registers, strip: Strip, out: Any, first: Any) -> None:
    for p in range(thread.kernel.params.strip):
        _store(thread, registers, strip, out, (p, first))


@T.inline
def _take_strip(thread, registers, out, index):
    """Compute a strip; the last one of a row begins early enough to end with it."""
    kernel, params = T.meta_var((thread.kernel, thread.kernel.params))
    per_row = T.meta_var(-(-params.columns // params.strip))
    begin = T.meta_var(index // params.vectors % per_row * params.strip)
    column = T.meta_var(begin if params.columns % params.strip == 0 else T.min(begin, params.columns - params.strip))
    strip = T.meta_var(Strip(index // params.vectors // per_row, column, index % params.vectors))
    for i in T.unroll(params.strip * params.width):
        registers.sums[i] = T.float32(0)
    for row in T.serial(kernel.sizes.rows.taps):
        for chunk in T.serial(kernel.chunks):
            _load_pixels(thread, registers, strip, (row, chunk))
            _add_products(thread, registers, strip.vector, (row, chunk))
    _store_all(thread, registers, strip, out, begin - column)


def _address(image: Any) -> Callable[[Any], Any]:
    return lambda element: image.ptr_to([element])


@T.inline
def _run(kernel, block, warp, lane):
    params, tile = T.meta_var((kernel.params, kernel.tile))
    number = T.meta_var(warp * WARP_LANES + lane)
    pool = T.SMEMPool()
    image = pool.alloc((tile.image_elements,), kernel.sizes.dtype, align=16)
    weights = pool.alloc((kernel.sizes.terms, tile.weight_pitch), kernel.sizes.dtype, align=16)
    pool.commit()
    thread = T.meta_var(Thread(kernel, image, weights, place_of(tile, block)))
    registers = T.meta_var(_registers(kernel))
    if kernel.has_pdl:
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
    copies = T.meta_var(Copies(kernel.convolution, tile, thread.place, (params.threads, number), _address(image), weights, kernel.is_async))
    copy_operands(copies)
    out = T.meta_var(flat(kernel.convolution.out))
    for turn in T.serial(params.turns):
        index = T.meta_var(turn * params.threads + number)
        if index < params.strips * params.vectors:
            _take_strip(thread, registers, out, index)


def build(kernel: GroupedConvSimtKernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the convolution's parameters."""
    return launched(kernel, kernel.params.threads // WARP_LANES, _run)
