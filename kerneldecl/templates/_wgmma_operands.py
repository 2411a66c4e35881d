"""Owns how wgmma's operands come from memory: tensor maps, the copies that fill a stage, the descriptors that wgmma reads it by.

Knows nothing of pipelines, results or how tiles are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerneldecl.templates._wgmma_product import Matrix

ROW_BYTES = 128
"""Of a row in shared memory, which the 128-byte swizzle permutes: the part of the reduction that a stage holds."""
PITCH_BYTES = 16
"""What TMA wants strides to be multiples of (CUDA driver API, cuTensorMapEncodeTiled)."""
MAX_BOX = 256
MAX_RANK = 5
SWIZZLES = {128: 3, 64: 2, 32: 1, 16: 0}
"""CUtensorMapSwizzle by the bytes of a box's rows."""
PROMOTION_128B = 2
EIGHT = 8
SLAB = 64
"""Rows that one wgmma multiplies, and those side by side in a row of shared memory where the reduction is not last."""


@dataclass(frozen=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled; sizes innermost first."""

    buffer: Any
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """Of all dims but the innermost."""
    box: tuple[int, ...]
    swizzle: int
    steps: tuple[int, ...] = ()
    """By which a box walks through each dim; 1 by default."""
    promotion: int = PROMOTION_128B

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def args(self) -> tuple[Any, ...]:
        steps = self.steps or (1,) * self.rank
        return (self.rank, self.buffer.data, *self.dims, *self.strides_bytes, *self.box, *steps, 0, self.swizzle, self.promotion, 0)


@dataclass(frozen=True)
class Copies:
    """Boxes of one tensor map that make up a tile, or a block's share of it."""

    map: TensorMap
    count: int
    """Of a block's share; numbers go on through the shares."""
    place: Callable[[Any], Any]
    """Number of a copy -> its first row in shared memory."""
    coords: Callable[[Any, Any, Any, Any], tuple[Any, ...]]
    """(batch, the tile's first row, step of the reduction, number) -> where its box starts."""


@dataclass(frozen=True)
class Operand:
    """One operand of wgmma: how a block copies its tile, or its share of it, to a stage, and how wgmma finds it there."""

    dtype: str
    """In shared memory: float8 lies there as bytes."""
    copies: tuple[Copies, ...]
    """One or two."""
    stage_rows: int
    """Of the whole tile in shared memory."""
    is_k_last: bool
    interleaved: int = 0
    """Of how many rows each run of eighths is one row of eight, the next one after it: see `_interleaved`; 0 where rows keep their order."""
    tail: int = 0
    """Elements of the last step that belong to the reduction, where what follows them is not zero already."""

    @property
    def item_bytes(self) -> int:
        return 2 if self.dtype.endswith("16") else 1

    @property
    def stage_elements(self) -> int:
        return self.stage_rows * ROW_BYTES // self.item_bytes

    @property
    def stage_bytes(self) -> int:
        return self.stage_rows * ROW_BYTES

    @property
    def row_elements(self) -> int:
        return ROW_BYTES // self.item_bytes

    @property
    def descriptor(self) -> tuple[int, int, int]:
        """Return the leading and stride offsets of wgmma's descriptor, in units of 16 bytes, and the swizzle.

        Rows of 128 bytes come in groups of eight, 1024 bytes apart; where the reduction is not last, slabs of 64 follow each other.
        """
        return (1 if self.is_k_last else SLAB * ROW_BYTES // 16), 64, SWIZZLES[ROW_BYTES]

    @property
    def slab_offset(self) -> int:
        """Return how far apart slabs of 64 rows lie, in units of 16 bytes: the same in both orders."""
        return SLAB * ROW_BYTES // 16

    def row_offset(self, rows: int) -> int:
        """Return where a multiple of 8 rows (64 where the reduction is not last) starts, in units of 16 bytes."""
        return rows * ROW_BYTES // 16

    @property
    def step_offset(self) -> int:
        """Return how far apart the parts of a stage are that one wgmma after the other takes: 32 bytes of k, or 16 rows of it."""
        return 2 if self.is_k_last else 16 * ROW_BYTES // 16


def io_dtype(dtype: str) -> str:
    """Return how elements are called where they are only moved."""
    return "uint8" if dtype.startswith("float8") else dtype


def placed(row: Any, rows: int) -> Any:
    """Return which row of so many an interleaved one is."""
    return row % (rows // EIGHT) * EIGHT + row // (rows // EIGHT) if rows else row


def operand_of(matrix: Matrix, tile_rows: int, share: int, unit: int) -> Operand | None:
    """Return how TMA copies one of `share` parts of a tile of a matrix, None where it cannot.

    Reductions that are not last have boxes of 64 rows, so that a tile has whole ones of them. Where rows are interleaved, they are among `unit`.
    """
    return _k_last(matrix, tile_rows, share) or _k_first(matrix, tile_rows, share) or _interleaved(matrix, tile_rows, share, unit)


def pitches(matrix: Matrix, pitch: int, extent: int, inner: int) -> tuple[int, ...] | None:
    """Return the strides of a matrix in bytes, None where TMA does not take them. One row has no pitch, so any will do."""
    item = matrix.item_bytes
    first = pitch * item if extent > 1 else -(-inner * item // PITCH_BYTES) * PITCH_BYTES
    strides = (first, *(stride * item for _, stride in reversed(matrix.batch)))
    return strides if all(stride % PITCH_BYTES == 0 for stride in strides) and len(strides) < MAX_RANK else None


def _k_last(matrix: Matrix, tile_rows: int, share: int) -> Operand | None:
    (rows, pitch), (terms, step) = matrix.rows, matrix.columns
    strides = pitches(matrix, pitch, rows, terms)
    box_rows = tile_rows // share
    if (step != 1 and terms > 1) or strides is None or box_rows > MAX_BOX or tile_rows % share or (share > 1 and box_rows % 8):
        return None
    dtype, block_k = io_dtype(matrix.dtype), ROW_BYTES // matrix.item_bytes
    extents = tuple(extent for extent, _ in reversed(matrix.batch))
    box = (block_k, box_rows, *(1 for _ in extents))
    tensor_map = TensorMap(matrix.buffer, dtype, (terms, rows, *extents), strides, box, SWIZZLES[ROW_BYTES])

    def coords(batch: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
        return (step * block_k, row + number * box_rows, *matrix.batch_index(batch))

    return Operand(dtype, (Copies(tensor_map, 1, lambda number: number * box_rows, coords),), tile_rows, is_k_last=True)


def _k_first(matrix: Matrix, tile_rows: int, share: int) -> Operand | None:
    (rows, step), (terms, pitch) = matrix.rows, matrix.columns
    strides = pitches(matrix, pitch, terms, rows)
    stage_rows = -(-tile_rows // SLAB) * SLAB
    if (step != 1 and rows > 1) or strides is None or matrix.item_bytes != 2 or (stage_rows // SLAB) % share:
        return None
    block_k = ROW_BYTES // matrix.item_bytes
    extents = tuple(extent for extent, _ in reversed(matrix.batch))
    box = (SLAB, block_k, *(1 for _ in extents))
    tensor_map = TensorMap(matrix.buffer, matrix.dtype, (rows, terms, *extents), strides, box, SWIZZLES[ROW_BYTES])

    def coords(batch: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
        return (row + number * SLAB, step * block_k, *matrix.batch_index(batch))

    copies = Copies(tensor_map, stage_rows // SLAB // share, lambda number: number * SLAB, coords)
    return Operand(matrix.dtype, (copies,), stage_rows, is_k_last=False)


def _interleaved(matrix: Matrix, tile_rows: int, share: int, unit: int) -> Operand | None:
    """Return how to copy rows whose length is no multiple of 16 bytes: eight of them always are, so TMA takes every eighth row at once.

    Row i of each eight starts i rows after the first, a place within TMA's innermost dimension. A box then holds rows i, i + 8, i + 16 ... of
    `unit`, and beyond the reduction the rows that follow in memory.
    """
    (rows, pitch), (terms, step) = matrix.rows, matrix.columns
    if (step != 1 and terms > 1) or matrix.item_bytes != 2 or matrix.batch or share > 1 or tile_rows % unit or unit % SLAB:
        return None
    block_k, box_rows = ROW_BYTES // matrix.item_bytes, unit // EIGHT
    more, eights = rows % EIGHT, rows // EIGHT

    def copies(first: int, count: int, within: int, extent: int) -> Copies:
        """Return the copies of rows `first` and so on of each eight, of tensors with so many rows in each eight and so many eights."""
        dims = ((within - 1) * pitch + terms, extent)
        tensor_map = TensorMap(
            matrix.buffer, matrix.dtype, dims, (EIGHT * pitch * matrix.item_bytes,), (block_k, box_rows), SWIZZLES[ROW_BYTES]
        )

        def coords(_batch: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
            return ((first + number % count) * pitch + step * block_k, row // EIGHT + number // count * box_rows)

        def place(number: Any) -> Any:
            return number // count * unit + (first + number % count) * box_rows

        return Copies(tensor_map, count * (tile_rows // unit), place, coords)

    # The last eight may lack rows. Those that it has are bounded by a map of their own: nothing is read beyond the matrix.
    if not eights:
        both = (copies(0, EIGHT, more, 1),)
    elif not more:
        both = (copies(0, EIGHT, EIGHT, eights),)
    else:
        both = (copies(0, more, more, eights + 1), copies(more, EIGHT - more, EIGHT, eights))
    return Operand(matrix.dtype, both, tile_rows, is_k_last=True, interleaved=unit, tail=terms % block_k)
