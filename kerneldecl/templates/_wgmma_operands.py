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
class Operand:
    """One operand of wgmma: how a block copies its tile, or its share of it, to a stage, and how wgmma finds it there."""

    dtype: str
    """In shared memory: float8 lies there as bytes."""
    map: TensorMap
    coords: Callable[[Any, Any, Any], tuple[Any, ...]]
    """(batch, row, step of the reduction) -> where the box starts."""
    copies: int
    """That fill a block's share of a tile."""
    copy_rows: int
    stage_rows: int
    """Of the whole tile in shared memory."""
    is_k_last: bool

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
    def copy_elements(self) -> int:
        return self.copy_rows * ROW_BYTES // self.item_bytes

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


def operand_of(matrix: Matrix, tile_rows: int, share: int) -> Operand | None:
    """Return how TMA copies one of `share` parts of a tile of a matrix, None where it cannot.

    Reductions that are not last have boxes of 64 rows, so that a tile has whole ones of them.
    """
    return _k_last(matrix, tile_rows, share) or _k_first(matrix, tile_rows, share)


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

    def coords(batch: Any, row: Any, step: Any) -> tuple[Any, ...]:
        return (step * block_k, row, *matrix.batch_index(batch))

    return Operand(dtype, tensor_map, coords, 1, box_rows, tile_rows, is_k_last=True)


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

    def coords(batch: Any, row: Any, step: Any) -> tuple[Any, ...]:
        return (row, step * block_k, *matrix.batch_index(batch))

    return Operand(matrix.dtype, tensor_map, coords, stage_rows // SLAB // share, SLAB, stage_rows, is_k_last=False)
