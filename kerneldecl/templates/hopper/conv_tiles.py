"""Owns how tiles of a convolution cover pixels, in boxes of images, rows and columns, and how their results leave.

Knows nothing of operands or of how tiles are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.epilogue import STAGED, Results, chunk_shape
from kerneldecl.templates.hopper.operands import PITCH_BYTES, SWIZZLES, TensorMap
from kerneldecl.templates.hopper.read_conv import Convolution


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


def results_of_boxes(convolution: Convolution, boxes: Boxes, tile_filters: int, *, is_swapped: bool) -> Results:
    """Return how the results of a convolution leave tiles of boxes of pixels: some pixels at a time, which are a box, too."""
    out, filters = convolution.out, convolution.filters
    dtype = str(out.dtype)
    images, height, width, _ = (int(extent) for extent in out.shape)
    line, lines = chunk_shape(boxes.pixels if is_swapped else tile_filters, is_swapped=is_swapped)
    pitch, in_pairs = filters * dtype_bytes(dtype), filters % 2 == 0
    tensor_map = None
    if dtype in STAGED and pitch % PITCH_BYTES == 0:
        strides = (pitch, width * pitch, height * width * pitch)
        box = (line, *reversed(boxes.part(lines)))
        tensor_map = TensorMap(out, dtype, (filters, width, height, images), strides, box, SWIZZLES[line * 2], promotion=0)

    def index(_: Any, row: Any, column: Any) -> list[Any]:
        pixel, channel = (column, row) if is_swapped else (row, column)
        return [*boxes.pixel(pixel), channel]

    def coords(batch: Any, row: Any, column: Any) -> tuple[Any, ...]:
        return tuple(reversed(index(batch, row, column)))

    def value(total: Any, batch: Any, row: Any, column: Any, addends: Sequence[Any]) -> Any:
        return convolution.value(total, index(batch, row, column), addends)

    def addends(batch: Any, row: Any, column: Any) -> list[Any]:
        *pixel, channel = index(batch, row, column)
        places = zip(pixel, boxes.results, boxes.tile, strict=True)
        within = [tirx.min(at, extent - 1) if extent % side else at for at, extent, side in places]
        # Pairs stay pairs.
        last = filters - 2 + channel % 2 if in_pairs else filters - 1
        return convolution.addends([*within, tirx.min(channel, last) if filters % tile_filters else channel])

    def inside(row: Any, column: Any) -> Any:
        places = zip(index(0, row, column), (images, height, width, filters), strict=True)
        return tirx.all(*(at < extent for at, extent in places))

    return Results(dtype, out, tensor_map, coords, index, value, addends, inside, is_swapped, line, lines, in_pairs)
