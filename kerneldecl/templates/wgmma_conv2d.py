"""Owns the kernel of convolutions on wgmma: TMA gathers windows of images into the tiles of a product, a fused epilogue.

Knows nothing of how its parameters are chosen, and recognises a convolution by its structure, never by its names.

A tile's rows are results of a box of pixels, w fastest, then h, then images; its columns are filters. A step of the reduction is
64 channels at one tap: the box of pixels that the tap meets, strided, and zeros where it reaches beyond the image.

Parameters: those of `wgmma_matmul`, without `swap`, and
  tile_w, tile_h    pixels of a tile along a row and along a column of the image, powers of two; it has block_m / (tile_w * tile_h) images

Returns a specialised function of TIRx, not a schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import IRModule, tirx

from kerneldecl.model import Arch, Value, dtype_bytes
from kerneldecl.templates._wgmma_image import Convolution, Window, read_convolution
from kerneldecl.templates._wgmma_kernel import Kernel, build
from kerneldecl.templates._wgmma_operands import MAX_BOX, PITCH_BYTES, ROW_BYTES, SWIZZLES, Copies, Operand, TensorMap
from kerneldecl.templates._wgmma_results import STAGED, Results, chunk_shape
from kerneldecl.templates._wgmma_tiles import SLAB, Tiles
from kerneldecl.templates.wgmma_matmul import FIRST_CAPABILITY, SUMS

MAX_STEP = 8
"""Of a box through a dimension of a tensor map."""
STEP_CHANNELS = ROW_BYTES // 2


@dataclass(frozen=True)
class Boxes:
    """How tiles of pixels cover results: (images, rows, columns) of the result, and of a tile."""

    results: tuple[int, int, int]
    tile: tuple[int, int, int]

    @property
    def pixels(self) -> int:
        return math.prod(self.tile)

    @property
    def counts(self) -> tuple[int, int, int]:
        images, rows, columns = (-(-extent // side) for extent, side in zip(self.results, self.tile, strict=True))
        return images, rows, columns

    @property
    def count(self) -> int:
        return math.prod(self.counts)

    def part(self, pixels: int) -> tuple[int, int, int]:
        """Return the box of so many neighbouring rows of a tile, a power of two."""
        columns = min(self.tile[2], pixels)
        rows = min(self.tile[1], pixels // columns)
        return pixels // (columns * rows), rows, columns

    def pixel(self, row: Any) -> tuple[Any, Any, Any]:
        """Return image, row and column of the result that a row of the product is."""
        _, rows, columns = self.counts
        _, tile_rows, tile_columns = self.tile
        tile, within = row // self.pixels, row % self.pixels
        image = tile // (rows * columns) * self.tile[0] + within // (tile_rows * tile_columns)
        return (
            image,
            tile // columns % rows * tile_rows + within // tile_columns % tile_rows,
            tile % columns * tile_columns + within % tile_columns,
        )


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the convolution with its epilogue as one specialised kernel, or None where wgmma, TMA or these sizes do not take it."""
    if arch.the_gpu.compute_capability[0] != FIRST_CAPABILITY[0]:
        return None
    convolution = read_convolution(mod)
    if convolution is None or not _takes(convolution):
        return None
    sides = (params["tile_h"], params["tile_w"])
    kernel = _kernel(convolution, Tiles.of({**params, "swap": 0}), sides, arch)  # type: ignore[arg-type]
    return None if kernel is None else build(kernel)


def _takes(convolution: Convolution) -> bool:
    """Say whether wgmma multiplies the dtypes and TMA brings the images."""
    dtypes = {str(convolution.image.dtype), str(convolution.weights.dtype)}
    windows = (convolution.rows, convolution.columns)
    return (
        len(dtypes) == 1
        and all(dtype_bytes(dtype) == 2 and SUMS.get(dtype) == convolution.sums_dtype for dtype in dtypes)
        and convolution.channels * 2 % PITCH_BYTES == 0
        and all(window.stride <= MAX_STEP for window in windows)
    )


def _kernel(convolution: Convolution, tiles: Tiles, sides: tuple[int, int], arch: Arch) -> Kernel | None:
    if not all(map(_is_power, (tiles.block_m, *sides))) or tiles.block_m % math.prod(sides):
        return None
    results = convolution.images, convolution.rows.results, convolution.columns.results
    boxes = Boxes(results, (tiles.block_m // math.prod(sides), *sides))
    rows = _image(convolution, boxes, tiles.block_m // tiles.cluster_n, tiles.block_m)
    columns = _weights(convolution, tiles.block_n, tiles.cluster_m)
    blocks = -(-convolution.channels // STEP_CHANNELS)
    steps = convolution.rows.taps * convolution.columns.taps * blocks
    dtype = str(convolution.image.dtype)
    if rows is None or columns is None or not tiles.fit(dtype, steps, rows.stage_bytes + columns.stage_bytes):
        return None
    grid = 1, boxes.count, -(-convolution.filters // tiles.block_n)
    made = _results(convolution, boxes, tiles.block_n)
    kernel = Kernel(convolution.params, dtype, rows, columns, made, tiles, grid, steps, arch.the_gpu.sm_count)
    return kernel if kernel.buffers or not made.is_staged or tiles.split > 1 else None


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _image(convolution: Convolution, boxes: Boxes, copy_rows: int, tile_rows: int) -> Operand | None:
    """Return how TMA brings the pixels that a tap meets."""
    buffer, blocks, taps = convolution.image, -(-convolution.channels // STEP_CHANNELS), convolution.columns.taps
    images, height, width, channels = (int(extent) for extent in buffer.shape)
    sides = boxes.part(copy_rows)
    # A box of one pixel along a side walks nowhere; of others TMA skips what lies between.
    along = (1, _step(convolution.rows, sides[1]), _step(convolution.columns, sides[2]))
    box = [side * step for side, step in zip(sides, along, strict=True)]
    if max(box) > MAX_BOX:
        return None
    strides = (channels * 2, width * channels * 2, height * width * channels * 2)
    tensor_map = TensorMap(
        buffer,
        str(buffer.dtype),
        (channels, width, height, images),
        strides,
        (STEP_CHANNELS, *reversed(box)),
        SWIZZLES[ROW_BYTES],
        (1, *reversed(along)),
    )

    def coords(_: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
        image, y, x = boxes.pixel(row + number * copy_rows)
        tap = step // blocks
        return (
            step % blocks * STEP_CHANNELS,
            x * convolution.columns.stride + tap % taps * convolution.columns.dilation - convolution.columns.padding,
            y * convolution.rows.stride + tap // taps * convolution.rows.dilation - convolution.rows.padding,
            image,
        )

    copies = Copies(tensor_map, 1, lambda number: number * copy_rows, coords)
    return Operand(str(buffer.dtype), (copies,), tile_rows, is_k_last=True)


def _step(window: Window, side: int) -> int:
    return window.stride if side > 1 else 1


def _weights(convolution: Convolution, tile_columns: int, share: int) -> Operand | None:
    """Return how TMA brings the weights of a tap, with filters or channels side by side."""
    buffer, blocks, taps = convolution.weights, -(-convolution.channels // STEP_CHANNELS), convolution.columns.taps
    filters, channels = convolution.filters, convolution.channels
    filter_stride, channel_stride, column_stride, row_stride = convolution.weight_strides
    is_k_last = channel_stride == 1
    if not is_k_last and filter_stride != 1:
        return None
    item, dtype = 2, str(buffer.dtype)
    inner, outer, pitch = (channels, filters, filter_stride) if is_k_last else (filters, channels, channel_stride)
    dense = -(-inner * item // PITCH_BYTES) * PITCH_BYTES
    strides = [stride * item or dense for stride in (pitch, column_stride, row_stride)]
    stage_rows = tile_columns if is_k_last else -(-tile_columns // SLAB) * SLAB
    copy_rows = tile_columns // share if is_k_last else SLAB
    is_shared = tile_columns % (8 * share) == 0 if is_k_last else stage_rows // SLAB % share == 0
    if any(stride % PITCH_BYTES for stride in strides) or not is_shared:
        return None
    box = (STEP_CHANNELS, copy_rows, 1, 1) if is_k_last else (SLAB, STEP_CHANNELS, 1, 1)
    dims = (inner, outer, convolution.columns.taps, convolution.rows.taps)
    tensor_map = TensorMap(buffer, dtype, dims, tuple(strides), box, SWIZZLES[ROW_BYTES])

    def coords(_: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
        tap, channel, column = step // blocks, step % blocks * STEP_CHANNELS, row + number * copy_rows
        place = (channel, column) if is_k_last else (column, channel)
        return (*place, tap % taps, tap // taps)

    copies = Copies(tensor_map, stage_rows // copy_rows // share, lambda number: number * copy_rows, coords)
    return Operand(dtype, (copies,), stage_rows, is_k_last=is_k_last)


def _results(convolution: Convolution, boxes: Boxes, block_n: int) -> Results:
    """Return how results leave: 64 pixels at a time, which are a box, too."""
    out, filters = convolution.out, convolution.filters
    dtype = str(out.dtype)
    images, height, width, _ = (int(extent) for extent in out.shape)
    line, lines = chunk_shape(block_n, is_swapped=False)
    pitch, in_pairs = filters * dtype_bytes(dtype), filters % 2 == 0
    tensor_map = None
    if dtype in STAGED and pitch % PITCH_BYTES == 0:
        strides = (pitch, width * pitch, height * width * pitch)
        box = (line, *reversed(boxes.part(lines)))
        tensor_map = TensorMap(out, dtype, (filters, width, height, images), strides, box, SWIZZLES[line * 2], promotion=0)

    def index(_: Any, row: Any, column: Any) -> list[Any]:
        return [*boxes.pixel(row), column]

    def coords(batch: Any, row: Any, column: Any) -> tuple[Any, ...]:
        return tuple(reversed(index(batch, row, column)))

    def value(total: Any, batch: Any, row: Any, column: Any, addends: Sequence[Any]) -> Any:
        return convolution.value(total, index(batch, row, column), addends)

    def addends(batch: Any, row: Any, column: Any) -> list[Any]:
        # Pairs stay pairs.
        last = filters - 2 + column % 2 if in_pairs else filters - 1
        *pixel, _ = index(batch, row, column)
        within = [
            tirx.min(at, extent - 1) if extent % side else at for at, extent, side in zip(pixel, boxes.results, boxes.tile, strict=True)
        ]
        return convolution.addends([*within, tirx.min(column, last) if filters % block_n else column])

    def inside(row: Any, column: Any) -> Any:
        places = zip(index(0, row, column), (images, height, width, filters), strict=True)
        image, y, x, place = (at < extent for at, extent in places)
        return tirx.all(image, y, x, place)

    return Results(dtype, out, tensor_map, coords, index, value, addends, inside, False, line, lines, in_pairs)
