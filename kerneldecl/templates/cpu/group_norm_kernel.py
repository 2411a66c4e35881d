"""Owns the kernel of group norms on CPUs: sums of channels by tasks, factors of channels, and the normalisation by the same tasks.

Knows nothing of how its parameters are chosen.

A task is one channel's pixels where these are neighbours in memory, else a block of pixels with all channels. Sums are of distances to the
group's first element, so that their squares lose nothing to a large mean (Chan, Golub, LeVeque, Algorithms for computing the sample
variance, 1983). Each sum has one order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import CpuGroupNormParams
from kerneldecl.analysis.group_norm import FACTORS, STATISTICS, GroupNormSizes
from kerneldecl.compiler.group_norm import GroupNormSpec, activated
from kerneldecl.templates.cpu.vectors import in_float32, load, loop, parallel, rounded, spread, store, variable


@dataclass(frozen=True)
class GroupNormKernel:
    """A group norm with the parameters of its kernel, and the function's arguments, each with one dimension but for gamma and beta."""

    spec: GroupNormSpec
    params: CpuGroupNormParams
    lanes: int
    args: dict[str, Any]
    sums: Any
    """Sums and those of squares, [task of an image, 2, channel or 1]."""
    factors: Any
    """What is subtracted from a channel's elements, what they are multiplied by, and what is added, [image, 3, channel]."""

    @property
    def sizes(self) -> GroupNormSizes:
        return self.spec.sizes

    @property
    def tasks(self) -> int:
        """Return the tasks of one image."""
        return tasks_of(self.spec.sizes, self.params)

    def first(self, image: Any, channel: Any) -> Any:
        """Return the first element of a channel's group, in float32."""
        sizes = self.sizes
        group = channel // sizes.size
        if self.spec.is_channels_last:
            return in_float32(self.args["X"][image * (sizes.pixels * sizes.channels) + group * sizes.size])
        return in_float32(self.args["X"][(image * sizes.groups + group) * (sizes.size * sizes.pixels)])

    def pixels(self, block: Any) -> tuple[Any, Any]:
        """Return the first pixel of a block, and how many it has."""
        first = T.bind(block * self.params.block)
        return first, T.bind(tirx.min(T.int64(self.params.block), self.sizes.pixels - first))


def tasks_of(sizes: GroupNormSizes, params: CpuGroupNormParams) -> int:
    return -(-sizes.pixels // params.block) if sizes.is_channels_last else sizes.channels


def build(spec: GroupNormSpec, params: CpuGroupNormParams, lanes: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, with vectors of so many float32."""
    sizes, tasks = spec.sizes, tasks_of(spec.sizes, params)
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        given = {name: T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in spec.arguments}
        args = {name: T.decl_buffer((math.prod(map(int, arg.shape)),), str(arg.dtype), data=arg.data) for name, arg in given.items()}
        kept = sizes.channels if spec.is_channels_last else 1
        sums = T.alloc_buffer((sizes.images * tasks, STATISTICS, kept), "float32")
        factors = T.alloc_buffer((sizes.images, FACTORS, sizes.channels), "float32")
        kernel = GroupNormKernel(spec, params, lanes, args, sums, factors)
        with _tasks(kernel) as (image, task):
            (_sum_pixels if spec.is_channels_last else _sum_channel)(kernel, image, task)
        with loop(sizes.images) as image, loop(sizes.groups) as group:
            _factors(kernel, image, group)
        with _tasks(kernel) as (image, task):
            (_normalise_pixels if spec.is_channels_last else _normalise_channel)(kernel, image, task)
    return tvm.IRModule({"main": builder.get()})


@contextmanager
def _tasks(kernel: GroupNormKernel) -> Iterator[tuple[Any, Any]]:
    count = kernel.sizes.images * kernel.tasks
    with (parallel if kernel.params.parallel else loop)(count) as task:
        yield T.bind(task // kernel.tasks), T.bind(task % kernel.tasks)


def _vectors(extent: int, lanes: int, body: Callable[[Any, int], None]) -> None:
    """Go along neighbouring elements in vectors, and through what is left one by one."""
    whole = extent // lanes if lanes > 1 else 0
    if whole:
        with loop(whole) as vector:
            body(vector * lanes, lanes)
    if extent > whole * lanes:
        with loop(extent - whole * lanes) as rest:
            body(whole * lanes + rest, 1)


def _at(buffer: Any, index: tuple[Any, ...], lanes: int) -> Any:
    return load(buffer, index, lanes) if lanes > 1 else in_float32(buffer[index])


def _put(buffer: Any, index: tuple[Any, ...], value: Any, lanes: int) -> None:
    store(buffer, index, value) if lanes > 1 else T.buffer_store(buffer, rounded(value, str(buffer.dtype)), list(index))


def _wide(value: Any, lanes: int) -> Any:
    return spread(value, lanes) if lanes > 1 else value


def _sum_pixels(kernel: GroupNormKernel, image: Any, block: Any) -> None:
    """Add up a block's pixels, channel by channel: as many vectors of channels together as the parameters say."""
    sizes, lanes = kernel.sizes, kernel.lanes
    row, (begin, count) = T.bind(image * kernel.tasks + block), kernel.pixels(block)
    distances = T.alloc_buffer((sizes.channels,), "float32")
    with loop(sizes.channels) as channel:
        T.buffer_store(distances, kernel.first(image, channel), [channel])

    def together(first: Any, vectors: int, width: int) -> None:
        sums = _zeros(vectors, width)
        with loop(count) as pixel:
            offset = T.bind((image * sizes.pixels + begin + pixel) * sizes.channels + first)
            for at in range(vectors):
                element = _at(kernel.args["X"], (offset + at * width,), width) - _at(distances, (first + at * width,), width)
                _add(sums, at, element, width)
        for k in range(STATISTICS):
            for at in range(vectors):
                _put(kernel.sums, (row, k, first + at * width), _at(sums[k][at], (0,), width), width)

    tile = kernel.params.vectors
    covered = sizes.channels // (tile * lanes) * (tile * lanes)
    if covered:
        with loop(covered // (tile * lanes)) as part:
            together(T.bind(part * (tile * lanes)), tile, lanes)
    if sizes.channels > covered:
        _vectors(sizes.channels - covered, lanes, lambda first, width: together(T.bind(covered + first), 1, width))


def _zeros(count: int, width: int) -> list[list[Any]]:
    """Return variables for sums, and as many for those of squares, that are zero."""
    sums = [[variable(width) for _ in range(count)] for _ in range(STATISTICS)]
    for each in itertools.chain.from_iterable(sums):
        _put(each, (0,), _wide(T.float32(0), width), width)
    return sums


def _add(sums: list[list[Any]], at: int, element: Any, width: int) -> None:
    """Add an element to a sum, and its square to another."""
    name = variable(width)
    _put(name, (0,), element, width)
    for k, term in enumerate((_at(name, (0,), width), _at(name, (0,), width) * _at(name, (0,), width))):
        _put(sums[k][at], (0,), _at(sums[k][at], (0,), width) + term, width)


def _sum_channel(kernel: GroupNormKernel, image: Any, channel: Any) -> None:
    """Add up a channel's pixels: vectors in turns to several sums, so that additions overlap."""
    sizes, lanes, tile = kernel.sizes, kernel.lanes, kernel.params.vectors
    offset = T.bind((image * sizes.channels + channel) * sizes.pixels)
    first = variable(1)
    T.buffer_store(first, kernel.first(image, channel), [0])
    total, sums = _zeros(1, 1), _zeros(tile, lanes)
    whole = sizes.pixels // (tile * lanes)
    if whole:
        with loop(whole) as step:
            for at in range(tile):
                _add(sums, at, load(kernel.args["X"], (offset + (step * tile + at) * lanes,), lanes) - spread(first[0], lanes), lanes)
        for (result,), several in zip(total, sums, strict=True):
            for each, lane in itertools.product(several, range(lanes)):
                T.buffer_store(result, result[0] + each[lane], [0])
    if sizes.pixels > whole * tile * lanes:
        with loop(sizes.pixels - whole * tile * lanes) as rest:
            _add(total, 0, in_float32(kernel.args["X"][offset + whole * tile * lanes + rest]) - first[0], 1)
    row = image * kernel.tasks + channel
    for k in range(STATISTICS):
        T.buffer_store(kernel.sums, total[k][0][0], [row, k, 0])


def _factors(kernel: GroupNormKernel, image: Any, group: Any) -> None:
    """Make of a group's sums what its channels' elements are computed with."""
    sizes = kernel.sizes
    totals = [variable(1) for _ in range(STATISTICS)]
    for each in totals:
        T.buffer_store(each, T.float32(0), [0])
    if kernel.spec.is_channels_last:
        with loop(kernel.tasks) as task, loop(sizes.size) as at:
            for k, each in enumerate(totals):
                T.buffer_store(each, each[0] + kernel.sums[image * kernel.tasks + task, k, group * sizes.size + at], [0])
    else:
        with loop(sizes.size) as at:
            for k, each in enumerate(totals):
                T.buffer_store(each, each[0] + kernel.sums[image * kernel.tasks + group * sizes.size + at, k, 0], [0])
    inverse = T.float32(1 / (sizes.size * sizes.pixels))
    mean, variance, deviation = (variable(1) for _ in range(3))
    T.buffer_store(mean, totals[0][0] * inverse, [0])
    T.buffer_store(variance, totals[1][0] * inverse - mean[0] * mean[0], [0])
    # What rounding leaves below zero is zero; NaN stays.
    above = tirx.Select(variance[0] < T.float32(0), T.float32(0), variance[0])
    T.buffer_store(deviation, T.float32(1) / tirx.sqrt(above + T.float32(kernel.spec.eps)), [0])
    with loop(sizes.size) as at:
        channel = group * sizes.size + at
        scale = in_float32(kernel.args["gamma"][channel]) * deviation[0]
        shift = in_float32(kernel.args["beta"][channel]) - mean[0] * scale
        for place, factor in enumerate((kernel.first(image, channel), scale, shift)):
            T.buffer_store(kernel.factors, factor, [image, place, channel])


def _normalise_pixels(kernel: GroupNormKernel, image: Any, block: Any) -> None:
    sizes = kernel.sizes
    begin, count = kernel.pixels(block)
    with loop(count) as pixel:
        offset = T.bind((image * sizes.pixels + begin + pixel) * sizes.channels)

        def element(channel: Any, lanes: int) -> None:
            factors = [_at(kernel.factors, (image, at, channel), lanes) for at in range(FACTORS)]
            _store_result(kernel, offset + channel, factors, lanes)

        _vectors(sizes.channels, kernel.lanes, element)


def _normalise_channel(kernel: GroupNormKernel, image: Any, channel: Any) -> None:
    sizes = kernel.sizes
    offset = T.bind((image * sizes.channels + channel) * sizes.pixels)
    factors = variable(FACTORS)
    for at in range(FACTORS):
        T.buffer_store(factors, kernel.factors[image, at, channel], [at])

    def element(pixel: Any, lanes: int) -> None:
        _store_result(kernel, offset + pixel, [_wide(factors[at], lanes) for at in range(FACTORS)], lanes)

    _vectors(sizes.pixels, kernel.lanes, element)


def _store_result(kernel: GroupNormKernel, offset: Any, factors: list[Any], lanes: int) -> None:
    """Normalise neighbouring elements: subtract the first factor, multiply by the second, add the third."""
    first, scale, shift = factors
    value = variable(lanes)
    _put(value, (0,), (_at(kernel.args["X"], (offset,), lanes) - first) * scale + shift, lanes)
    _put(kernel.args["Y"], (offset,), activated(kernel.spec.activation, _at(value, (0,), lanes)), lanes)
