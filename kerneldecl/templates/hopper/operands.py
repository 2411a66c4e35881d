"""Owns how wgmma's operands come from memory: tensor maps, the copies that fill a stage, the descriptors that wgmma reads it by.

Knows nothing of pipelines, results or how tiles are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.read_gemm import Matrix

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
SWIZZLED = 8
"""Rows that the 128-byte swizzle permutes together: a box begins with the first of them."""
MAX_COPIES = 4
"""Of one block for a stage of an operand; more boxes take longer to start than a stage lasts."""


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
    """Of a block's share, at most; numbers go on through the shares."""
    place: Callable[[Any], Any]
    """Number of a copy -> its first row in shared memory."""
    coords: Callable[[Any, Any, Any, Any], tuple[Any, ...]]
    """(batch, the tile's first row, step of the reduction, number) -> where its box starts."""
    total: int = 0
    """Of all shares where these are not alike: the last blocks have fewer boxes, or none."""


@dataclass(frozen=True)
class Gather:
    """How threads load what TMA does not take: where rows start anywhere, or bytes lie the wrong way round."""

    matrix: Matrix
    align_bytes: int
    """What every row's start is a multiple of, at most 16."""
    is_transposed: bool
    """Whether what lies side by side is across the rows of shared memory, so that each element is loaded by itself."""


@dataclass(frozen=True)
class Operand:
    """One operand of wgmma: how a block copies its tile, or its share of it, to a stage, and how wgmma finds it there."""

    dtype: str
    """In shared memory: float8 lies there as bytes, TF32 as float32."""
    copies: tuple[Copies, ...]
    """One, none where it is gathered."""
    stage_rows: int
    """Of the whole tile in shared memory."""
    is_k_last: bool
    gather: Gather | None = None

    @property
    def item_bytes(self) -> int:
        return dtype_bytes(self.dtype)

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
    return "uint8" if dtype.startswith("float8") else "float32" if dtype == "tfloat32" else dtype


def operand_of(matrix: Matrix, tile_rows: int, share: int) -> Operand | None:
    """Return how one of `share` parts of a matrix's tile is brought: by TMA, else through registers, None where neither can.

    Reductions that are not last have boxes of 64 rows, so that a tile has whole ones of them.
    """
    return _k_last(matrix, tile_rows, share) or _k_first(matrix, tile_rows, share) or gathered(matrix, tile_rows, share)


def is_copied(matrix: Matrix) -> bool:
    """Say whether TMA brings a matrix."""
    return (_k_last(matrix, SLAB, 1) or _k_first(matrix, SLAB, 1)) is not None


def pitches(matrix: Matrix, pitch: int, extent: int, inner: int) -> tuple[int, ...] | None:
    """Return the strides of a matrix in bytes, None where TMA does not take them. One row has no pitch, so any will do."""
    item = matrix.item_bytes
    first = pitch * item if extent > 1 else -(-inner * item // PITCH_BYTES) * PITCH_BYTES
    strides = (first, *(stride * item for _, stride in reversed(matrix.batch)))
    return strides if all(stride % PITCH_BYTES == 0 for stride in strides) and len(strides) < MAX_RANK else None


def _k_last(matrix: Matrix, tile_rows: int, share: int) -> Operand | None:
    (rows, pitch), (terms, step) = matrix.rows, matrix.columns
    strides = pitches(matrix, pitch, rows, terms)
    box_rows, count, total = (tile_rows, 1, 1) if share == 1 else shares(tile_rows, share)
    if (step != 1 and terms > 1) or strides is None or box_rows > MAX_BOX or count > MAX_COPIES:
        return None
    dtype, block_k = io_dtype(matrix.dtype), ROW_BYTES // matrix.item_bytes
    extents = tuple(extent for extent, _ in reversed(matrix.batch))
    box = (block_k, box_rows, *(1 for _ in extents))
    tensor_map = TensorMap(matrix.buffer, dtype, (terms, rows, *extents), strides, box, SWIZZLES[ROW_BYTES])

    def coords(batch: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
        return (step * block_k, row + number * box_rows, *matrix.batch_index(batch))

    copies = Copies(tensor_map, count, lambda number: number * box_rows, coords, total if total < count * share else 0)
    return Operand(dtype, (copies,), tile_rows, is_k_last=True)


def shares(tile_rows: int, share: int) -> tuple[int, int, int]:
    """Return the rows of a box, and how many boxes a block brings at most and all of them, where blocks share a tile of whole swizzles."""
    units = tile_rows // SWIZZLED
    most = -(-units // share)
    box = max(size for size in range(1, most + 1) if units % size == 0)
    return box * SWIZZLED, -(-units // (box * share)), units // box


def _k_first(matrix: Matrix, tile_rows: int, share: int) -> Operand | None:
    (rows, step), (terms, pitch) = matrix.rows, matrix.columns
    strides = pitches(matrix, pitch, terms, rows)
    stage_rows = -(-tile_rows // SLAB) * SLAB
    if (step != 1 and rows > 1) or strides is None or matrix.item_bytes != 2:
        return None
    block_k = ROW_BYTES // matrix.item_bytes
    extents = tuple(extent for extent, _ in reversed(matrix.batch))
    box = (SLAB, block_k, *(1 for _ in extents))
    tensor_map = TensorMap(matrix.buffer, matrix.dtype, (rows, terms, *extents), strides, box, SWIZZLES[ROW_BYTES])

    def coords(batch: Any, row: Any, step: Any, number: Any) -> tuple[Any, ...]:
        return (row + number * SLAB, step * block_k, *matrix.batch_index(batch))

    total = stage_rows // SLAB
    copies = Copies(tensor_map, -(-total // share), lambda number: number * SLAB, coords, total if total % share else 0)
    return Operand(matrix.dtype, (copies,), stage_rows, is_k_last=False)


def gathered(matrix: Matrix, tile_rows: int, share: int) -> Operand | None:
    """Return how threads bring an operand: 16-bit elements as they lie, others always with the reduction last, as wgmma wants them."""
    (rows, row_step), (terms, step) = matrix.rows, matrix.columns
    elements = rows * row_step + terms * step + sum(extent * stride for extent, stride in matrix.batch)
    if share > 1 or elements >= 2**31:
        return None
    item = matrix.item_bytes
    is_dense_k = step == 1 or terms == 1
    is_k_last = item != 2 or is_dense_k
    if not is_dense_k and row_step != 1 and rows > 1:
        return None
    pitch = row_step if is_dense_k else step
    align_bytes = math.gcd(16, pitch * item, *(stride * item for _, stride in matrix.batch))
    stage_rows = tile_rows if is_k_last else -(-tile_rows // SLAB) * SLAB
    gather = Gather(matrix, align_bytes, is_k_last != is_dense_k)
    return Operand(io_dtype(matrix.dtype), (), stage_rows, is_k_last=is_k_last, gather=gather)
