"""Owns what the epilogue makes of a tile's accumulators and where it goes: elements, auxiliary operands, chunks that leave at once.

Knows nothing of operands, pipelines or how tiles are chosen, nor of the statements that store chunks, which is `store`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.script import tirx as T
from tvm.sym import Analyzer

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS, WARPGROUP_THREADS
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.operands import SWIZZLES, TensorMap, tma_strides
from kerneldecl.templates.hopper.read_gemm import GemmProblem

SMEM_DTYPES = ("float16", "bfloat16")
"""Data types of results that are stored through shared memory: stmatrix takes elements of 16 bits."""


class TileOperand(NamedTuple):
    """An auxiliary operand with the result's shape and dtype, such as a residual: TMA can load its tiles where it stores results."""

    number: int
    """Which of the auxiliary operands it is."""
    map: TensorMap


@dataclass(frozen=True)
class Epilogue:
    """What becomes of a tile's accumulators. Rows and columns are wgmma's; lines are what is contiguous in the result's memory."""

    dtype: str
    buffer: Any
    map: TensorMap | None
    """Tensor map of boxes of `width` elements in `lines` lines; None where TMA cannot store them."""
    coords: Callable[[Any, Any, Any], tuple[Any, ...]]
    """(batch, row, column) -> where a box starts."""
    index: Callable[[Any, Any, Any], list[Any]]
    """(batch, row, column) -> indices of the buffer."""
    value: Callable[[Any, Any, Any, Any, Sequence[Any]], Any]
    """(accumulator, batch, row, column, values of the auxiliary operands there) -> the element."""
    aux: Callable[[Any, Any, Any], list[Any]]
    """(batch, row, column) -> loads of the auxiliary operands, in bounds also for rows and columns beyond the result."""
    inside: Callable[[Any, Any], Any]
    """(row, column) -> whether the result has them."""
    is_swapped: bool
    """Whether lines are columns."""
    width: int
    lines: int
    in_pairs: bool
    """Whether two neighbours in a line, the first at an even place, can be stored at once."""
    tile_operand: TileOperand | None = None
    is_streaming: bool = False
    """Whether TMA loads the tile operand to shared memory; its value then is the last of the auxiliary operands', and `aux` omits it."""

    def streaming(self) -> Epilogue:
        """Return the epilogue whose tile operand TMA loads."""
        assert self.tile_operand is not None
        number = self.tile_operand.number

        def aux(batch: Any, row: Any, column: Any) -> list[Any]:
            loads = self.aux(batch, row, column)
            return loads[:number] + loads[number + 1 :]

        def value(total: Any, batch: Any, row: Any, column: Any, aux: Sequence[Any]) -> Any:
            *others, streamed = aux
            return self.value(total, batch, row, column, [*others[:number], streamed, *others[number:]])

        return replace(self, aux=aux, value=value, is_streaming=True)

    @property
    def via_smem(self) -> bool:
        """Say whether results go through shared memory, so that whole lines are stored."""
        return self.dtype in SMEM_DTYPES

    @property
    def chunk_elements(self) -> int:
        return self.width * self.lines

    @property
    def chunk_accumulators(self) -> int:
        """Return how many accumulators of a thread are stored at once, where results go through shared memory."""
        return self.chunk_elements // WARPGROUP_THREADS

    def chunks(self, accumulators: int) -> int:
        """Return in how many chunks a consumer stores its threads' accumulators."""
        return accumulators * WARPGROUP_THREADS // self.chunk_elements

    def element(self, total: Any, batch: Any, row: Any, column: Any) -> Any:
        """Return the element that an accumulator becomes, auxiliary operands loaded in place."""
        return self.value(total, batch, row, column, self.aux(batch, row, column))

    @property
    def aux_dtypes(self) -> list[str]:
        return [str(load.ty.dtype) for load in self.aux(*(tirx.const(0, "int32"),) * 3)]

    def aux_registers(self, elements: int) -> int:
        """Return how many registers of a thread hold the auxiliary operands of so many elements: pairs of 16 bits share one."""
        is_packed = self.in_pairs and not self.is_swapped
        return sum(elements * dtype_bytes(dtype) // 4 if is_packed else elements for dtype in self.aux_dtypes)

    def is_identity(self, total: Any) -> bool:
        """Say whether an accumulator is stored as it is."""
        zero = tirx.const(0, "int32")
        return not self.is_streaming and bool(self.element(total, zero, zero, zero).same_as(total))

    @property
    def has_calls(self) -> bool:
        """Say whether an element takes a function, such as gelu, rather than a few additions."""
        zero = tirx.const(0, "int32")
        calls: list[Any] = []
        tvm_ffi.structural_map(self.element(tirx.const(0.0, "float32"), zero, zero, zero), [(Call, calls.append)], order="pre")
        return bool(calls)

    def value_float32(self, total: Any, at: tuple[Any, Any, Any], aux: Sequence[Any]) -> Any:
        """Return the element at (batch, row, column) in float32, before it is rounded to 16 bits."""
        value = self.value(total, *at, aux)
        if isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == "float32":
            return value.value
        return value if str(value.ty.dtype) == "float32" else T.cast(value, "float32")


def meta_vars(values: Sequence[Any]) -> list[Any]:
    """Return values so that TVM's parser takes names for them, rather than variables that hold them."""
    return [T.meta_var(value) for value in values]


def tile_operand_of(store_map: TensorMap | None, out: Any, loads: Sequence[Any], index: Sequence[Any]) -> TileOperand | None:
    """Return the first operand that is read where the result is stored, given both at one symbolic place; None where TMA cannot load it."""
    if store_map is None:
        return None
    shape, analyzer = [int(extent) for extent in out.shape], Analyzer()
    for number, load in enumerate(loads):
        same_buffer = str(load.source.dtype) == str(out.dtype) and [int(extent) for extent in load.source.shape] == shape
        if same_buffer and all(analyzer.can_prove_equal(own, other) for own, other in zip(load.indices, index, strict=True)):
            return TileOperand(number, replace(store_map, buffer=load.source))
    return None


def gemm_epilogue(gemm: GemmProblem, tile: tuple[int, int], *, is_swapped: bool) -> Epilogue:
    """Return the epilogue of a GEMM in tiles of so many rows and columns."""
    _, m, n, _ = gemm.extents
    width, lines = chunk_shape(tile[1], is_swapped=is_swapped)
    (_, pitch), (columns, stride) = gemm.out.rows, gemm.out.columns
    is_dense = stride == 1 or columns == 1
    in_pairs = is_dense and n % 2 == 0 and pitch % 2 == 0

    def unswapped(row: Any, column: Any) -> tuple[Any, Any]:
        return (column, row) if is_swapped else (row, column)

    def coords(batch: Any, row: Any, column: Any) -> tuple[Any, ...]:
        line, place = unswapped(row, column)
        return (place, line, *gemm.out.batch_index(batch))

    def index(batch: Any, row: Any, column: Any) -> list[Any]:
        return gemm.index_out(batch, *unswapped(row, column))

    def value(total: Any, batch: Any, row: Any, column: Any, aux: Sequence[Any]) -> Any:
        return gemm.value(total, batch, *unswapped(row, column), aux)

    def aux(batch: Any, row: Any, column: Any) -> list[Any]:
        line, place = unswapped(row, column)
        tile_lines, tile_places = unswapped(*tile)
        # Pairs stay pairs.
        last = n - 2 + place % 2 if in_pairs else n - 1
        return gemm.aux(batch, T.min(line, m - 1) if m % tile_lines else line, T.min(place, last) if n % tile_places else place)

    def inside(row: Any, column: Any) -> Any:
        line, place = unswapped(row, column)
        return T.And(line < m, place < n)

    store_map = _store_map(gemm, width, lines)
    place = [tirx.Var(name, "int32") for name in ("batch", "m", "n")]
    return Epilogue(
        dtype=gemm.out.dtype,
        buffer=gemm.out.buffer,
        map=store_map,
        tile_operand=tile_operand_of(store_map, gemm.out.buffer, gemm.aux(*place), gemm.index_out(*place)),
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


def _store_map(gemm: GemmProblem, width: int, lines: int) -> TensorMap | None:
    """Return the tensor map by which TMA stores chunks of so many elements in so many lines, None where it cannot."""
    matrix = gemm.out
    (rows, pitch), (columns, stride) = matrix.rows, matrix.columns
    strides = tma_strides(matrix, pitch, rows, columns)
    extents = tuple(extent for extent, _ in reversed(matrix.batch))
    is_dense = stride == 1 or columns == 1
    # TMA stores 16 bytes at once, also where a matrix ends amid them: a single row may.
    if matrix.dtype not in SMEM_DTYPES or not is_dense or strides is None or columns * matrix.item_bytes % 16:
        return None
    return TensorMap(
        buffer=matrix.buffer,
        dtype=matrix.dtype,
        dims=(columns, rows, *extents),
        strides_bytes=strides,
        box=(width, lines, *(1 for _ in extents)),
        swizzle=swizzle_of(width),
        promotion=0,
    )


def chunk_shape(block_n: int, *, is_swapped: bool) -> tuple[int, int]:
    """Return the elements of a line and the lines that are stored at once, of a 64-row MMA tile of so many columns."""
    columns = block_n if is_swapped and block_n <= MMA_TILE_ROWS else math.gcd(block_n, MMA_TILE_ROWS)
    return (MMA_TILE_ROWS, columns) if is_swapped else (columns, MMA_TILE_ROWS)


def longest_line(block_n: int) -> int:
    """Return the most elements of a line, up to 64, of which a tile's columns are a multiple, where TMA stores chunks.

    Lines of a power of two are swizzled. Those of an odd multiple of 8 need not be: eight of them begin in different banks.
    """
    odd = (width for width in range(8, MMA_TILE_ROWS, 16) if block_n % width == 0)
    return max(math.gcd(block_n, MMA_TILE_ROWS), *odd, 0)


def is_swizzled(width: int) -> bool:
    """Say whether a chunk is swizzled whose lines have so many elements of 16 bits."""
    return width * 2 in SWIZZLES


def swizzle_of(width: int) -> int:
    """Return the CUtensorMapSwizzle of such a chunk."""
    return SWIZZLES.get(width * 2, 0)
