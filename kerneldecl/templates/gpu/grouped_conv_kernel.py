"""Owns the kernel of convolutions in groups on mma.sync: copies by cp.async, the products of each warp, its results.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import tvm
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.grouped_conv import K_STEP, N_TILE
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.templates.gpu.grouped_conv_config import WORD, GroupedConvKernel
from kerneldecl.templates.gpu.grouped_conv_copy import Copies, Place, copy_operands, flat, place_of, result_index
from kerneldecl.templates.gpu.grouped_conv_launch import launched

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x{}{}.shared.b16"


class Smem(NamedTuple):
    """Shared memory of a thread block."""

    image: Any
    """Words of its part of the image."""
    weights: Any
    """Terms by filters."""
    staging: Any
    """Results of one fragment of each warp."""


class Warp(NamedTuple):
    """A warp's view of the kernel, while its script is read."""

    kernel: GroupedConvKernel
    smem: Smem
    place: Place
    warp: Any
    lane: Any

    @property
    def thread(self) -> Any:
        return self.warp * WARP_LANES + self.lane

    @property
    def warp_m(self) -> Any:
        return self.warp % self.kernel.params.warps_m

    @property
    def warp_n(self) -> Any:
        return self.warp // self.kernel.params.warps_m

    @property
    def first_filter(self) -> Any:
        """Return the warp's first filter, counted from the thread block's first."""
        return self.warp_n * (self.kernel.params.warp_tiles * N_TILE)


# ---- operands

Part = tuple[Any, int]
"""A buffer of registers, and the first of some in it."""


class Registers(NamedTuple):
    """Registers of a thread."""

    weights: Any
    """Those of all steps and tiles, or of one pair of steps and one tile."""
    pixels: Any
    """Four for each fragment, of one pair of steps."""
    windows: Any
    """Where the windows of the lane's pixels begin in shared memory, in words."""
    sums: Any


def _registers(kernel: GroupedConvKernel) -> Registers:
    params = kernel.params
    held = params.warp_tiles * 2 * kernel.step_pairs if params.holds_weights(kernel.sizes) else 2
    windows = params.fragments * (1 if kernel.by_ldmatrix else 2)
    return Registers(
        weights=T.alloc_local((held,), "uint32"),
        pixels=T.alloc_local((4 * params.fragments,), "uint32"),
        windows=T.alloc_local((windows,), "int32"),
        sums=T.alloc_local((params.accumulators(kernel.sizes),), "float32"),
    )


def _load_matrices(to: Part, address: Any, count: int, *, is_transposed: bool = False) -> None:
    """Load so many matrices of 8 rows of 16 bytes, a register for each."""
    registers, first = to
    T.evaluate(T.ptx[LDMATRIX.format(count, ".trans" if is_transposed else "")](*[registers[first + i] for i in range(count)], address))


def _load_weights(warp: Warp, to: Part, tile: int, steps: range) -> None:
    """Load the weights of a tile of filters for some steps, each to a register; zeros for a step behind the last."""
    kernel, lane = warp.kernel, warp.lane
    last, stop = kernel.sizes.terms - 1, min(steps.stop, kernel.steps)
    step = steps.start
    while step < stop:
        count = max(each for each in (1, 2, 4) if each <= stop - step)
        term = (step + lane // 8 % count) * K_STEP + lane % 8
        row = T.min(term, last) if (step + count) * K_STEP > last + 1 else term
        address = warp.smem.weights.ptr_to([row, warp.first_filter + tile * N_TILE])
        _load_matrices((to[0], to[1] + step - steps.start), address, count, is_transposed=True)
        step += count
    for behind in range(stop, steps.stop):
        T.buffer_store(to[0], T.uint32(0), [to[1] + behind - steps.start])


def _hold_weights(warp: Warp, registers: Registers) -> None:
    """Load all weights of a warp's filters."""
    steps = 2 * warp.kernel.step_pairs
    for tile in range(warp.kernel.params.warp_tiles):
        _load_weights(warp, (registers.weights, tile * steps), tile, range(steps))


def _set_windows(warp: Warp, windows: Any, first: Any) -> None:
    """Note where the windows of a lane's pixels begin, for fragments from one on."""
    kernel, lane = warp.kernel, warp.lane
    group = kernel.warp_group(warp.warp_n) * (kernel.sizes.channels // WORD)
    for fragment in range(kernel.params.fragments):
        index = (first + fragment) * FRAGMENT
        if kernel.by_ldmatrix:
            T.buffer_store(windows, kernel.window(index + lane % 16) + group, [fragment])
        else:
            for half in range(2):
                T.buffer_store(windows, kernel.window(index + half * 8 + lane // 4) + group, [2 * fragment + half])


def _load_pixels(warp: Warp, registers: Registers, at: tuple[int, int, int]) -> None:
    """Load the terms of two steps of 16 pixels, the operand A of one mma.sync; `at` is fragment, group of the warp, and first step."""
    fragment, group, step = at
    kernel, lane, image, first = warp.kernel, warp.lane, warp.smem.image, 4 * fragment
    channel = group * (kernel.sizes.channels // WORD)
    count = min(2, kernel.steps - step)
    if kernel.by_ldmatrix:
        terms = [kernel.term((step + half) * K_STEP) for half in range(count)]
        jump = T.Select(lane >= 16, terms[1] - terms[0], 0) if count == 2 else 0
        _load_matrices((registers.pixels, first), image.ptr_to([registers.windows[fragment] + jump + (terms[0] + channel)]), 2 * count)
    else:
        for half in range(count):
            term, valid = kernel.lane_term(step + half, lane), kernel.valid_pairs(step + half)
            for row in range(2):
                value = image[registers.windows[2 * fragment + row] + term + channel]
                # What lies behind the last term may be infinite, and the weights there are others'.
                value = value if valid == 4 else T.Select(lane % 4 < valid, value, T.uint32(0))
                T.buffer_store(registers.pixels, value, [first + 2 * half + row])
    for behind in range(2 * count, 4):
        T.buffer_store(registers.pixels, T.uint32(0), [first + behind])


def _multiply(kernel: GroupedConvKernel, sums: Part, a: Part, b: Part, *, is_first: bool) -> None:
    """Multiply fragments: 16 x 8 sums, 16 x 16 of A, 16 x 8 of B."""
    accumulators = [sums[0][sums[1] + i] for i in range(4)]
    before = [T.float32(0)] * 4 if is_first else accumulators
    T.evaluate(T.ptx[kernel.mma](*accumulators, *[a[0][a[1] + i] for i in range(4)], *[b[0][b[1] + i] for i in range(2)], *before))


def _multiply_group(warp: Warp, registers: Registers, group: int, tiles: list[int]) -> None:
    """Multiply the pixels' channels of one group, and the weights of the tiles that have filters of it."""
    kernel, params = warp.kernel, warp.kernel.params
    is_held = params.holds_weights(kernel.sizes)
    for pair in range(kernel.step_pairs):
        for fragment in range(params.fragments):
            _load_pixels(warp, registers, (fragment, group, 2 * pair))
        for tile in tiles:
            if not is_held:
                _load_weights(warp, (registers.weights, 0), tile, range(2 * pair, 2 * pair + 2))
            b = (registers.weights, (tile * kernel.step_pairs + pair) * 2 if is_held else 0)
            for fragment in range(params.fragments):
                sums = (registers.sums, kernel.accumulator(fragment, tile, group))
                _multiply(kernel, sums, (registers.pixels, 4 * fragment), b, is_first=pair == 0)


def _merge_groups(warp: Warp, sums: Any) -> None:
    """Take, of a tile that was multiplied for several groups, each lane's sums of the group that its filters belong to."""
    kernel = warp.kernel
    for fragment, tile in itertools.product(range(kernel.params.fragments), range(kernel.params.warp_tiles)):
        first, *others = kernel.tile_groups(tile)
        for i in range(4 if others else 0):
            to = kernel.accumulator(fragment, tile, first) + i
            value = sums[to]
            for group in others:
                is_group = warp.lane % 4 * 2 >= group * kernel.sizes.filters - tile * N_TILE
                value = T.Select(is_group, sums[kernel.accumulator(fragment, tile, group) + i], value)
            T.buffer_store(sums, value, [to])


# ---- results


def _element(warp: Warp, registers: Registers, place: tuple[int, int, Any], pixel: tuple[Any, Any, Any]) -> Any:
    """Return a result: `place` is fragment, tile and which of the lane's four it is; `pixel` is image, row and column."""
    kernel, convolution = warp.kernel, warp.kernel.convolution
    column = warp.first_filter + place[1] * N_TILE + warp.lane % 4 * 2 + place[2] % 2
    index = result_index(kernel.tile, pixel, warp.place.filters * kernel.params.block_n + column)
    total = registers.sums[kernel.accumulator(place[0], place[1], kernel.tile_groups(place[1])[0]) + place[2]]
    return convolution.value(total, index, convolution.aux(index))


def _pixel(warp: Warp, index: Any) -> tuple[Any, Any, Any]:
    """Return image, row and column of a result of the thread block."""
    row, column = warp.kernel.pixel(index)
    return warp.place.image, warp.place.row + row, warp.place.column + column


@T.inline
def _stage_pair(warp, registers, place, pixel):
    """Leave two neighbouring results in shared memory; `place` is fragment, tile and which half of the fragment's rows they are in."""
    fragment, tile, half = T.meta_var(place)
    row, column = T.meta_var((half * 8 + warp.lane // 4, tile * N_TILE + warp.lane % 4 * 2))
    for v in T.vectorized(2):
        warp.smem.staging[warp.warp, row, column + v] = _element(warp, registers, (fragment, tile, half * 2 + v), pixel)


def _stage(warp: Warp, registers: Registers, fragment: int, first: Any) -> None:
    """Compute a fragment's results, and leave them in shared memory."""
    for half in range(2):
        pixel = _pixel(warp, first * FRAGMENT + half * 8 + warp.lane // 4)
        for tile in range(warp.kernel.params.warp_tiles):
            _stage_pair(warp, registers, (fragment, tile, half), pixel)


@T.inline
def _store(warp, out, first):
    """Store a fragment's results in whole rows."""
    kernel, params = T.meta_var((warp.kernel, warp.kernel.params))
    rows, columns = T.meta_var((kernel.sizes.rows.results, kernel.sizes.columns.results))
    pieces = T.meta_var(params.warp_tiles * N_TILE // kernel.out_piece)
    for i in T.unroll(-(-FRAGMENT * pieces // WARP_LANES)):
        at = T.meta_var(i * WARP_LANES + warp.lane)
        row, piece = T.meta_var((at // pieces, at % pieces))
        index = T.meta_var(first * FRAGMENT + row)
        y = T.meta_var(warp.place.row + index // params.columns)
        x = T.meta_var(warp.place.column + index % params.columns)
        is_pixel = T.meta_var(T.And(index < params.rows * params.columns, T.And(y < rows, x < columns)))
        if T.And(at < FRAGMENT * pieces, is_pixel):
            filters = T.meta_var(warp.place.filters * params.block_n + warp.first_filter + piece * kernel.out_piece)
            begin: T.let = ((warp.place.image * rows + y) * columns + x) * kernel.convolution.filters + filters
            for v in T.vectorized(kernel.out_piece):
                out[begin + v] = warp.smem.staging[warp.warp, row, piece * kernel.out_piece + v]


def _take_pixels(warp: Warp, registers: Registers, out: Any, first: Any) -> None:
    """Multiply a warp's fragments from one on, and store their results."""
    _set_windows(warp, registers.windows, first)
    for group, tiles in warp.kernel.group_tiles().items():
        _multiply_group(warp, registers, group, tiles)
    _merge_groups(warp, registers.sums)
    for fragment in range(warp.kernel.params.fragments):
        # The lanes have stored the fragment before.
        T.evaluate(T.cuda.warp_sync())
        _stage(warp, registers, fragment, first + fragment)
        T.evaluate(T.cuda.warp_sync())
        _store(warp, out, first + fragment)


def _address(image: Any) -> Callable[[Any], Any]:
    return lambda element: image.ptr_to([element // WORD])


@T.inline
def _run(kernel, block, warp_id, lane):
    params, tile = T.meta_var((kernel.params, kernel.tile))
    pool = T.SMEMPool()
    image = pool.alloc((tile.image_elements // WORD,), "uint32", align=16)
    weights = pool.alloc((kernel.sizes.terms, tile.weight_pitch), kernel.sizes.dtype, align=16)
    staging = pool.alloc((params.warps_m * params.warps_n, FRAGMENT, kernel.staging_pitch), kernel.sizes.out_dtype, align=16)
    pool.commit()
    place = T.meta_var(place_of(tile, block))
    warp = T.meta_var(Warp(kernel, Smem(image, weights, staging), place, warp_id, lane))
    registers = T.meta_var(_registers(kernel))
    if kernel.has_pdl:
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
    copies = T.meta_var(Copies(kernel.convolution, tile, place, (params.threads, warp.thread), _address(image), weights))
    copy_operands(copies)
    out = T.meta_var(flat(kernel.convolution.out))
    if params.holds_weights(kernel.sizes):
        _hold_weights(warp, registers)
    for turn in T.serial(kernel.turns):
        first = T.meta_var((turn * params.warps_m + warp.warp_m) * params.fragments)
        if first < params.pixel_fragments():
            _take_pixels(warp, registers, out, first)


def build(kernel: GroupedConvKernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the convolution's parameters."""
    return launched(kernel, kernel.params.warps_m * kernel.params.warps_n, _run)
