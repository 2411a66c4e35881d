"""Owns what kernels of convolutions in groups share: a thread block's place, its copies of image and weights to shared memory.

Knows nothing of what is computed of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.grouped_conv_params import ConvTile
from kerneldecl.compiler.intrinsics.int4_dot import cp_async_source
from kerneldecl.templates.gpu.cuda_types import access_type
from kerneldecl.templates.hopper.read_conv import Convolution

UNROLLED_COPIES = 16
"""Copies of a thread at most that are unrolled."""


class Place(NamedTuple):
    """Where the results of a thread block are."""

    image: Any
    row: Any
    column: Any
    filters: Any
    """Its tile of filters."""


class Copies(NamedTuple):
    """How a thread block copies, while a kernel's script is read."""

    convolution: Convolution
    tile: ConvTile
    place: Place
    threads: tuple[int, Any]
    """How many there are, and which one this is."""
    image_at: Callable[[Any], Any]
    """From an element of the image's part in shared memory to its address."""
    weights: Any
    """Terms by filters in shared memory."""
    is_async: bool = True
    """Whether pieces are copied by cp.async, else through registers."""

    def source(self, nbytes: int) -> tuple[str, str]:
        """Return the name and CUDA of the function that copies so many bytes to shared memory, or zeros in their place."""
        return cp_async_source(nbytes) if self.is_async else _copy_source(nbytes)


def _copy_source(nbytes: int) -> tuple[str, str]:
    name, access = f"kd_copy_{nbytes}", access_type(nbytes)
    return (
        name,
        f"""
__device__ __forceinline__ void {name}(void* to, const void* from, int asked) {{
  {access} held = {{}};
  if (asked != 0) held = *static_cast<const {access}*>(from);
  *static_cast<{access}*>(to) = held;
}}
""",
    )


def place_of(tile: ConvTile, block: Any) -> Place:
    """Return the place of a thread block: neighbours read other channels of the same pixels."""
    filters, rest = block % tile.channel_tiles, block // tile.channel_tiles
    column, rest = rest % tile.column_tiles * tile.columns, rest // tile.column_tiles
    return Place(rest // tile.row_tiles, rest % tile.row_tiles * tile.rows, column, filters)


def place_in_line(tile: ConvTile, column: Any) -> Any:
    """Return where in a row a pixel lies: those of equal remainder by the stride lie together, as neighbouring windows need them."""
    stride = tile.sizes.columns.stride
    return column if stride == 1 else column % stride * (tile.line // stride) + column // stride


def result_index(tile: ConvTile, pixel: tuple[Any, Any, Any], filters: Any) -> Sequence[Any]:
    """Return the index of a result whose pixel may lie beyond the image: that of the last one."""
    image, row, column = pixel
    rows, columns = tile.sizes.rows.results, tile.sizes.columns.results
    at_row = row if rows % tile.rows == 0 else T.min(row, rows - 1)
    return (image, at_row, column if columns % tile.columns == 0 else T.min(column, columns - 1), filters)


def flat(buffer: Any) -> Any:
    """Return a buffer with one dimension; within the kernel alone."""
    return T.decl_buffer((math.prod(int(extent) for extent in buffer.shape),), str(buffer.dtype), data=buffer.data)


def _loop(total: int, threads: int) -> Any:
    """Return the loop over the copies of a thread."""
    count = -(-total // threads)
    return T.unroll(count) if count <= UNROLLED_COPIES else T.serial(count)


def _first_channel(tile: ConvTile, filters: Any) -> Any:
    """Return the first input channel of a tile of filters."""
    return filters * tile.slab if tile.block_n >= tile.sizes.filters else filters * tile.block_n // tile.sizes.filters * tile.slab


def _start_image_copy(copies: Copies, index: Any) -> None:
    """Start to copy a piece of the thread block's part of the image; zeros for what is beyond the image."""
    convolution, tile, at = copies.convolution, copies.tile, copies.place
    pieces, width = tile.slab // tile.image_piece, tile.line_pixels
    piece, column, row = index % pieces, index // pieces % width, index // (pieces * width)
    y = at.row * convolution.rows.stride - convolution.rows.padding + row
    x = at.column * convolution.columns.stride - convolution.columns.padding + column
    is_inside = T.And(T.And(y >= 0, y < convolution.rows.image), T.And(x >= 0, x < convolution.columns.image))
    channel = _first_channel(tile, at.filters) + piece * tile.image_piece
    to = (row * tile.line + place_in_line(tile, column)) * tile.pitch + piece * tile.image_piece
    nbytes = tile.image_piece * tile.sizes.item_bytes
    name, source = copies.source(nbytes)
    origin = convolution.image.ptr_to([at.image, T.Select(is_inside, y, 0), T.Select(is_inside, x, 0), channel])
    T.evaluate(T.cuda.func_call(name, copies.image_at(to), origin, T.Select(is_inside, nbytes, 0), source_code=source))


def _start_weight_copy(copies: Copies, source: Any, index: Any) -> None:
    """Start to copy a piece of the weights of the thread block's filters, as they lie: terms by filters."""
    tile = copies.tile
    _, channel, column, row = copies.convolution.weight_strides
    channels, taps = tile.sizes.channels, tile.sizes.columns.taps
    pieces = tile.block_n // tile.weight_piece
    term, piece = index // pieces, index % pieces
    begin = term // (channels * taps) * row + term // channels % taps * column + term % channels * channel
    nbytes = tile.weight_piece * tile.sizes.item_bytes
    name, code = copies.source(nbytes)
    origin = source.ptr_to([begin + copies.place.filters * tile.block_n + piece * tile.weight_piece])
    T.evaluate(T.cuda.func_call(name, copies.weights.ptr_to([term, piece * tile.weight_piece]), origin, nbytes, source_code=code))


@T.inline
def copy_operands(copies):
    """Copy the thread block's weights and its part of the image to shared memory."""
    tile, source = T.meta_var((copies.tile, flat(copies.convolution.weights)))
    threads, thread = T.meta_var(copies.threads)
    weights = T.meta_var(tile.sizes.terms * (tile.block_n // tile.weight_piece))
    pixels = T.meta_var(tile.lines * tile.line_pixels * (tile.slab // tile.image_piece))
    for i in _loop(weights, threads):
        if i * threads + thread < weights:
            _start_weight_copy(copies, source, i * threads + thread)
    for i in _loop(pixels, threads):
        if i * threads + thread < pixels:
            _start_image_copy(copies, i * threads + thread)
    if copies.is_async:
        T.ptx.cp.async_.commit_group()
        T.ptx.cp.async_.wait_group(0)
    T.cuda.cta_sync()


def are_weights_contiguous(convolution: Convolution, tile: ConvTile) -> bool:
    """Say whether the weights of neighbouring filters are neighbours, and pieces begin at multiples of their size."""
    filters, *strides = convolution.weight_strides
    return filters == 1 and all(stride % tile.weight_piece == 0 for stride in strides)
