"""Owns how wgmma's operands come from memory: tensor maps, the TMA boxes that fill a stage, the descriptors that wgmma reads it by.

Knows nothing of pipelines, epilogues or how tiles are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kerneldecl.analysis.hopper_limits import (
    K_TILE_BYTES,
    MAX_TMA_BOX,
    MAX_TMA_BOXES,
    MAX_TMA_RANK,
    MMA_TILE_ROWS,
    SWIZZLE_ROWS,
    TMA_ALIGN_BYTES,
    TMA_SMEM_ALIGN_BYTES,
)
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.read_gemm import Matrix

if TYPE_CHECKING:
    from kerneldecl.templates.hopper.tails import Tail

SWIZZLES = {128: 3, 64: 2, 32: 1, 16: 0}
"""CUtensorMapSwizzle by the bytes of a box's rows."""
PROMOTIONS = {128: 2, 256: 3}
"""CUtensorMapL2promotion by the bytes that L2 fetches at once."""
DESCRIPTOR_UNIT = 16
"""Bytes in which wgmma's descriptors count addresses and offsets (PTX ISA, "Matrix Descriptor Format")."""
MAX_OFFSET = 2**31
"""Elements that 32-bit offsets address."""


@dataclass(frozen=True)
class TensorMap:
    """The arguments of cuTensorMapEncodeTiled; sizes innermost first."""

    buffer: Any
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    """Strides of all dims but the innermost."""
    box: tuple[int, ...]
    swizzle: int
    box_strides: tuple[int, ...] = ()
    """Traversal stride of a box along each dim; 1 by default."""
    promotion: int = PROMOTIONS[128]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def args(self) -> tuple[Any, ...]:
        box_strides = self.box_strides or (1,) * self.rank
        return (self.rank, self.buffer.data, *self.dims, *self.strides_bytes, *self.box, *box_strides, 0, self.swizzle, self.promotion, 0)


@dataclass(frozen=True)
class TmaBoxes:
    """Boxes of one tensor map that make up a tile. Where CTAs of a cluster share it, each loads some of them."""

    map: TensorMap
    per_cta: int
    """Boxes that one CTA loads, at most; the next CTA's numbers follow."""
    first_row: Callable[[Any], Any]
    """Number of a box -> its first row in shared memory."""
    coords: Callable[[Any, Any, Any, Any], tuple[Any, ...]]
    """(batch, the tile's first row, k-tile, number of the box) -> where the box starts."""
    total: int = 0
    """Boxes of all CTAs where the last ones have fewer, or none; 0 where all have as many."""
    tail: Tail | None = None
    """How the last rows are loaded, where they fill no tile and have a box of their own."""


@dataclass(frozen=True)
class RegisterLoads:
    """How threads load an operand through registers that TMA does not take: rows start anywhere, or elements are transposed."""

    matrix: Matrix
    align_bytes: int
    """What every row's start is a multiple of, at most 16."""
    is_transposed: bool
    """Whether contiguous elements are across the rows of shared memory, so that each element is loaded by itself."""


@dataclass(frozen=True)
class Operand:
    """One operand of wgmma: how CTAs load its tile to a stage, and how wgmma finds it there."""

    dtype: str
    """Data type in shared memory: float8 is held as bytes, TF32 as float32."""
    stage_rows: int
    """Rows of the whole tile in shared memory, each of `row_bytes`."""
    is_k_last: bool
    """Whether k is contiguous in shared memory."""
    tma: TmaBoxes | None
    """None where threads load it through registers."""
    register_loads: RegisterLoads | None = None
    in_registers: bool = False
    """Whether wgmma takes it from registers, to which consumers load it from stages: operand A of TF32 whose k comes first there, or of
    weights that they dequantise."""
    row_bytes: int = K_TILE_BYTES
    """Bytes of a row's k-tile: fewer where weights are packed."""

    @property
    def via_registers(self) -> bool:
        return self.register_loads is not None

    @property
    def has_tail(self) -> bool:
        """Say whether the last rows have a box of their own."""
        return self.tma is not None and self.tma.tail is not None

    def promoted(self, fetched_bytes: int) -> Operand:
        """Return the operand of which L2 fetches so many bytes at once."""
        assert self.tma is not None
        return replace(self, tma=replace(self.tma, map=replace(self.tma.map, promotion=PROMOTIONS[fetched_bytes])))

    @property
    def item_bytes(self) -> int:
        return dtype_bytes(self.dtype)

    @property
    def stage_elements(self) -> int:
        return self.stage_bytes // self.item_bytes

    @property
    def stage_bytes(self) -> int:
        return self.stage_rows * self.row_bytes

    @property
    def aligned_bytes(self) -> int:
        """Return the bytes from one stage to the next where TMA's boxes may start there."""
        return -(-self.stage_bytes // TMA_SMEM_ALIGN_BYTES) * TMA_SMEM_ALIGN_BYTES

    @property
    def row_elements(self) -> int:
        return self.row_bytes // self.item_bytes

    @property
    def descriptor(self) -> tuple[int, int, int]:
        """Return the leading and stride offsets of wgmma's descriptor, in units of 16 bytes, and the swizzle.

        Rows of 128 bytes come in groups of eight, 1024 bytes from one to the next; where k is not last, MMA tiles follow each other.
        """
        return (1 if self.is_k_last else self.mma_tile_offset), K_TILE_BYTES * SWIZZLE_ROWS // DESCRIPTOR_UNIT, SWIZZLES[K_TILE_BYTES]

    @property
    def mma_tile_offset(self) -> int:
        """Return the offset from one 64-row MMA tile to the next, in units of 16 bytes: the same whether or not k is last."""
        return self.row_offset(MMA_TILE_ROWS)

    def row_offset(self, rows: int) -> int:
        """Return where a multiple of 8 rows (64 where k is not last) starts, in units of 16 bytes."""
        return rows * K_TILE_BYTES // DESCRIPTOR_UNIT

    @property
    def k_offset(self) -> int:
        """Return the offset from one wgmma's k to the next one's, in units of 16 bytes: 32 bytes along a row, or 16 rows of k."""
        return 2 if self.is_k_last else self.row_offset(16)


def io_dtype(dtype: str) -> str:
    """Return the data type as which elements are moved: float8 as bytes, TF32 as float32."""
    return "uint8" if dtype.startswith("float8") else "float32" if dtype == "tfloat32" else dtype


def operand_of(matrix: Matrix, tile_rows: int, ctas: int, *, is_a: bool = False) -> Operand | None:
    """Return how `ctas` CTAs of a cluster load a matrix's tile: by TMA, else through registers, None where neither can.

    Where k is not last boxes have 64 rows, or 32 of TF32, so that a tile has whole ones of them. `is_a` says that it is wgmma's operand A,
    which may come from registers.
    """
    by_tma = _by_tma_k_last(matrix, tile_rows, ctas) or _by_tma_k_first(matrix, tile_rows, ctas, is_a=is_a)
    return by_tma or through_registers(matrix, tile_rows, ctas)


def is_tma_loadable(matrix: Matrix) -> bool:
    return (_by_tma_k_last(matrix, MMA_TILE_ROWS, 1) or _by_tma_k_first(matrix, MMA_TILE_ROWS, 1)) is not None


def tma_strides(matrix: Matrix, pitch: int, extent: int, inner: int) -> tuple[int, ...] | None:
    """Return the strides of a matrix in bytes, None where TMA does not take them. One row has no pitch, so any will do."""
    item = matrix.item_bytes
    first = pitch * item if extent > 1 else -(-inner * item // TMA_ALIGN_BYTES) * TMA_ALIGN_BYTES
    strides = (first, *(stride * item for _, stride in reversed(matrix.batch)))
    return strides if all(stride % TMA_ALIGN_BYTES == 0 for stride in strides) and len(strides) < MAX_TMA_RANK else None


def _by_tma_k_last(matrix: Matrix, tile_rows: int, ctas: int) -> Operand | None:
    (rows, pitch), (k, k_stride) = matrix.rows, matrix.columns
    strides = tma_strides(matrix, pitch, rows, k)
    box_rows, per_cta, total = (tile_rows, 1, 1) if ctas == 1 else shared_boxes(tile_rows, ctas)
    if (k_stride != 1 and k > 1) or strides is None or box_rows > MAX_TMA_BOX or per_cta > MAX_TMA_BOXES:
        return None
    dtype, block_k = io_dtype(matrix.dtype), K_TILE_BYTES // matrix.item_bytes
    extents = tuple(extent for extent, _ in reversed(matrix.batch))
    tensor_map = TensorMap(
        buffer=matrix.buffer,
        dtype=dtype,
        dims=(k, rows, *extents),
        strides_bytes=strides,
        box=(block_k, box_rows, *(1 for _ in extents)),
        swizzle=SWIZZLES[K_TILE_BYTES],
    )

    def coords(batch: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
        return (k_tile * block_k, row + number * box_rows, *matrix.batch_index(batch))

    boxes = TmaBoxes(tensor_map, per_cta, lambda number: number * box_rows, coords, total=total if total < per_cta * ctas else 0)
    return Operand(dtype, tile_rows, is_k_last=True, tma=boxes)


def shared_boxes(tile_rows: int, ctas: int) -> tuple[int, int, int]:
    """Return the rows of a box, how many boxes one of the CTAs that share a tile loads at most, and how many there are.

    Boxes have whole groups of rows that the swizzle permutes together.
    """
    groups = tile_rows // SWIZZLE_ROWS
    most = -(-groups // ctas)
    box = max(size for size in range(1, most + 1) if groups % size == 0)
    return box * SWIZZLE_ROWS, -(-groups // (box * ctas)), groups // box


def _by_tma_k_first(matrix: Matrix, tile_rows: int, ctas: int, *, is_a: bool = False) -> Operand | None:
    (rows, row_stride), (k, pitch) = matrix.rows, matrix.columns
    strides = tma_strides(matrix, pitch, k, rows)
    stage_rows = -(-tile_rows // MMA_TILE_ROWS) * MMA_TILE_ROWS
    in_registers = is_a and matrix.dtype == "tfloat32"
    if (row_stride != 1 and rows > 1) or strides is None or (matrix.item_bytes != 2 and not in_registers):
        return None
    block_k = box_rows = K_TILE_BYTES // matrix.item_bytes
    extents = tuple(extent for extent, _ in reversed(matrix.batch))
    tensor_map = TensorMap(
        buffer=matrix.buffer,
        dtype=io_dtype(matrix.dtype),
        dims=(rows, k, *extents),
        strides_bytes=strides,
        box=(box_rows, block_k, *(1 for _ in extents)),
        swizzle=SWIZZLES[K_TILE_BYTES],
    )

    def coords(batch: Any, row: Any, k_tile: Any, number: Any) -> tuple[Any, ...]:
        return (row + number * box_rows, k_tile * block_k, *matrix.batch_index(batch))

    total = stage_rows // box_rows
    boxes = TmaBoxes(tensor_map, -(-total // ctas), lambda number: number * box_rows, coords, total=total if total % ctas else 0)
    return Operand(io_dtype(matrix.dtype), stage_rows, is_k_last=False, tma=boxes, in_registers=in_registers)


def through_registers(matrix: Matrix, tile_rows: int, ctas: int) -> Operand | None:
    """Return how threads load an operand: 16-bit elements in their own order, others always with k last, as wgmma needs them."""
    (rows, row_stride), (k, k_stride) = matrix.rows, matrix.columns
    elements = rows * row_stride + k * k_stride + sum(extent * stride for extent, stride in matrix.batch)
    if ctas > 1 or elements >= MAX_OFFSET:
        return None
    item = matrix.item_bytes
    is_dense_k = k_stride == 1 or k == 1
    is_k_last = item != 2 or is_dense_k
    if not is_dense_k and row_stride != 1 and rows > 1:
        return None
    pitch = row_stride if is_dense_k else k_stride
    align_bytes = math.gcd(16, pitch * item, *(stride * item for _, stride in matrix.batch))
    stage_rows = tile_rows if is_k_last else -(-tile_rows // MMA_TILE_ROWS) * MMA_TILE_ROWS
    loads = RegisterLoads(matrix, align_bytes, is_transposed=is_k_last != is_dense_k)
    return Operand(io_dtype(matrix.dtype), stage_rows, is_k_last=is_k_last, tma=None, register_loads=loads)
