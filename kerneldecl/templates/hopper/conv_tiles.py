"""Owns how tiles of a convolution cover pixels, in boxes of images, rows and columns, and how their results are stored.

Knows nothing of operands or of how tiles are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from kerneldecl.analysis.hopper_limits import TMA_ALIGN_BYTES
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.epilogue import SMEM_DTYPES, Epilogue, chunk_shape, swizzle_of, tile_operand_of
from kerneldecl.templates.hopper.operands import TensorMap
from kerneldecl.templates.hopper.read_conv import Convolution


@dataclass(frozen=True)
class PixelBoxes:
    """How tiles, each a box of pixels, cover a convolution's results: (images, rows, columns) of all and of a tile."""

    results: tuple[int, int, int]
    tile: tuple[int, int, int]
    line: int = 0
    """Filters of a pixel that TMA stores at once; 0 for as many as a power of two allows."""

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
        """Return the box of so many neighbouring pixels of a tile, a power of two."""
        columns = min(self.tile[2], pixels)
        rows = min(self.tile[1], pixels // columns)
        return pixels // (columns * rows), rows, columns

    def pixel(self, row: Any) -> tuple[Any, Any, Any]:
        """Return image, row and column of the result that a row of the GEMM is."""
        _, rows, columns = self.counts
        _, tile_rows, tile_columns = self.tile
        tile, within = row // self.pixels, row % self.pixels
        image = tile // (rows * columns) * self.tile[0] + within // (tile_rows * tile_columns)
        return (
            image,
            tile // columns % rows * tile_rows + within // tile_columns % tile_rows,
            tile % columns * tile_columns + within % tile_columns,
        )


def conv_epilogue(convolution: Convolution, boxes: PixelBoxes, tile_filters: int, *, is_swapped: bool, step: int = 1) -> Epilogue:
    """Return the epilogue of a convolution in tiles of boxes of pixels: chunks hold some of the pixels, which are a box, too.

    Boxes of a transposed convolution have pixels that lie a step apart; the batch is the phase, the place of the first one.
    """
    filters = convolution.filters
    extents = (*boxes.results, filters)
    width, lines = chunk_shape(boxes.pixels if is_swapped else tile_filters, is_swapped=is_swapped)
    in_pairs = filters % 2 == 0

    def in_phase(row: Any, column: Any) -> list[Any]:
        pixel, channel = (column, row) if is_swapped else (row, column)
        return [*boxes.pixel(pixel), channel]

    def placed(batch: Any, pixel: Sequence[Any], channel: Any) -> list[Any]:
        image, y, x = pixel
        return [image, y, x, channel] if step == 1 else [image, y * step + batch // step, x * step + batch % step, channel]

    def index(batch: Any, row: Any, column: Any) -> list[Any]:
        *pixel, channel = in_phase(row, column)
        return placed(batch, pixel, channel)

    def coords(batch: Any, row: Any, column: Any) -> tuple[Any, ...]:
        image, y, x, channel = in_phase(row, column)
        return (channel, x, y, image) if step == 1 else (batch % step * filters + channel, x, batch // step, y, image)

    def value(total: Any, batch: Any, row: Any, column: Any, aux: Sequence[Any]) -> Any:
        return convolution.value(total, index(batch, row, column), aux)

    def aux(batch: Any, row: Any, column: Any) -> list[Any]:
        *pixel, channel = in_phase(row, column)
        places = zip(pixel, boxes.results, boxes.tile, strict=True)
        within = [tirx.min(at, extent - 1) if extent % side else at for at, extent, side in places]
        # Pairs stay pairs.
        last = filters - 2 + channel % 2 if in_pairs else filters - 1
        return convolution.aux(placed(batch, within, tirx.min(channel, last) if filters % tile_filters else channel))

    def inside(row: Any, column: Any) -> Any:
        return tirx.all(*(at < extent for at, extent in zip(in_phase(row, column), extents, strict=True)))

    box = tuple(reversed(boxes.part(lines)))
    store_map = _store_map(convolution, (boxes.line or width, *box), step)
    width = boxes.line if boxes.line and store_map is not None else width
    place = [tirx.Var(name, "int32") for name in ("image", "row", "column", "filter")]
    return Epilogue(
        dtype=str(convolution.out.dtype),
        buffer=convolution.out,
        map=store_map,
        tile_operand=tile_operand_of(store_map, convolution.out, convolution.aux(place), place),
        coords=coords,
        index=index,
        value=value,
        aux=aux,
        inside=inside,
        is_swapped=is_swapped,
        width=width,
        lines=lines,
        in_pairs=in_pairs,
    )


def _store_map(convolution: Convolution, box: tuple[int, ...], step: int) -> TensorMap | None:
    """Return the tensor map by which TMA stores boxes of filters, columns, rows and images, None where it cannot.

    Pixels that lie a step apart are those of one dimension: the columns between are filters beyond the last one, the rows a dimension.
    """
    out, filters = convolution.out, convolution.filters
    dtype = str(out.dtype)
    images, height, width, _ = (int(extent) for extent in out.shape)
    pitch = filters * dtype_bytes(dtype)
    # A box of a phase must not reach into the next one's filters.
    if dtype not in SMEM_DTYPES or pitch % TMA_ALIGN_BYTES or (step > 1 and filters % box[0]):
        return None
    row = width * pitch
    dims: tuple[int, ...] = (filters, width, height, images)
    strides: tuple[int, ...] = (pitch, row, height * row)
    if step > 1:
        dims = (step * filters, width // step, step, height // step, images)
        strides, box = (step * pitch, row, step * row, height * row), (box[0], box[1], 1, *box[2:])
    return TensorMap(buffer=out, dtype=dtype, dims=dims, strides_bytes=strides, box=box, swizzle=swizzle_of(box[0]), promotion=0)
