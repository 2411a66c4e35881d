"""Owns how a wgmma kernel's sums leave it: the epilogue on each, stmatrix and TMA to whole rows, or stores of single threads.

Knows nothing of operands, pipelines or how tiles are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.ir import Call
from tvm.script import tirx as T

from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.operands import SLAB, SWIZZLES, TensorMap, pitches
from kerneldecl.templates.hopper.read_gemm import Product

STAGED = ("float16", "bfloat16")
STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group"
STMATRIX = "stmatrix.sync.aligned.m8n8.x{}{}.shared.b16"


@dataclass(frozen=True)
class Results:
    """What becomes of a tile's sums. Rows and columns are wgmma's; lines are what lies side by side in memory."""

    dtype: str
    buffer: Any
    map: TensorMap | None
    """Of boxes of `width` elements in `lines` lines; None where TMA cannot store them."""
    coords: Callable[[Any, Any, Any], tuple[Any, ...]]
    """(batch, row, column) -> where a box starts."""
    index: Callable[[Any, Any, Any], list[Any]]
    """(batch, row, column) -> indices of the buffer."""
    value: Callable[[Any, Any, Any, Any, Sequence[Any]], Any]
    """(sum, batch, row, column, the epilogue's operands there) -> the element."""
    addends: Callable[[Any, Any, Any], list[Any]]
    """(batch, row, column) -> loads of the epilogue's operands, in bounds also for rows and columns beyond the result."""
    inside: Callable[[Any, Any], Any]
    """(row, column) -> whether the result has them."""
    is_swapped: bool
    """Whether lines are columns."""
    width: int
    lines: int
    in_pairs: bool
    """Whether two neighbours in a line, the first of an even place, can be stored at once."""

    @property
    def is_staged(self) -> bool:
        """Say whether results go through shared memory, so that whole lines are stored."""
        return self.dtype in STAGED

    @property
    def chunk_elements(self) -> int:
        return self.width * self.lines

    def chunks(self, sums: int) -> int:
        """Return in how many chunks the sums of a consumer leave."""
        return sums * 128 // self.chunk_elements

    def element(self, total: Any, batch: Any, row: Any, column: Any) -> Any:
        """Return the element that a sum becomes, its epilogue's operands loaded in place."""
        return self.value(total, batch, row, column, self.addends(batch, row, column))

    @property
    def addend_dtypes(self) -> list[str]:
        return [str(load.ty.dtype) for load in self.addends(*(tirx.const(0, "int32"),) * 3)]

    def addend_registers(self, elements: int) -> int:
        """Return how many registers hold what the epilogue adds to so many elements of a thread: pairs share them."""
        is_packed = self.in_pairs and not self.is_swapped
        return sum(elements * dtype_bytes(dtype) // 4 if is_packed else elements for dtype in self.addend_dtypes)

    def keeps(self, total: Any) -> bool:
        """Say whether sums are stored as they are."""
        zero = tirx.const(0, "int32")
        return bool(self.element(total, zero, zero, zero).same_as(total))

    @property
    def takes_long(self) -> bool:
        """Say whether an element takes a function, such as gelu, rather than a few additions."""
        zero = tirx.const(0, "int32")
        calls: list[Any] = []
        tvm_ffi.structural_map(self.element(tirx.const(0.0, "float32"), zero, zero, zero), [(Call, calls.append)], order="pre")
        return bool(calls)

    def wide(self, total: Any, batch: Any, row: Any, column: Any, addends: Sequence[Any]) -> Any:
        """Return an element in float32, before it is rounded to 16 bits."""
        value = self.value(total, batch, row, column, addends)
        if isinstance(value, tirx.Cast) and str(value.value.ty.dtype) == "float32":
            return value.value
        return value if str(value.ty.dtype) == "float32" else T.cast(value, "float32")


def each(values: Sequence[Any]) -> list[Any]:
    """Return values so that TVM's parser takes names for them, rather than variables that hold them."""
    return [T.meta_var(value) for value in values]


def results_of(gemm: Product, tile: tuple[int, int], *, is_swapped: bool) -> Results:
    """Return how the results of a product leave tiles of so many rows and columns."""
    _, m, n, _ = gemm.extents
    width, lines = chunk_shape(tile[1], is_swapped=is_swapped)
    matrix = gemm.out
    (rows, pitch), (columns, step) = matrix.rows, matrix.columns
    strides = pitches(matrix, pitch, rows, columns)
    is_dense = step == 1 or columns == 1
    in_pairs = is_dense and n % 2 == 0 and pitch % 2 == 0
    extents = tuple(extent for extent, _ in reversed(matrix.batch))
    tensor_map = None
    # TMA stores 16 bytes at once, also where a matrix ends amid them: a single row may.
    if matrix.dtype in STAGED and is_dense and strides is not None and columns * matrix.item_bytes % 16 == 0:
        box = (width, lines, *(1 for _ in extents))
        tensor_map = TensorMap(matrix.buffer, matrix.dtype, (columns, rows, *extents), strides, box, SWIZZLES[width * 2], promotion=0)

    def unswapped(row: Any, column: Any) -> tuple[Any, Any]:
        return (column, row) if is_swapped else (row, column)

    def coords(batch: Any, row: Any, column: Any) -> tuple[Any, ...]:
        line, place = unswapped(row, column)
        return (place, line, *matrix.batch_index(batch))

    def index(batch: Any, row: Any, column: Any) -> list[Any]:
        return gemm.index_out(batch, *unswapped(row, column))

    def value(total: Any, batch: Any, row: Any, column: Any, addends: Sequence[Any]) -> Any:
        return gemm.value(total, batch, *unswapped(row, column), addends)

    def addends(batch: Any, row: Any, column: Any) -> list[Any]:
        line, place = unswapped(row, column)
        tile_lines, tile_places = unswapped(*tile)
        # Pairs stay pairs.
        last = n - 2 + place % 2 if in_pairs else n - 1
        return gemm.addends(batch, T.min(line, m - 1) if m % tile_lines else line, T.min(place, last) if n % tile_places else place)

    def inside(row: Any, column: Any) -> Any:
        line, place = unswapped(row, column)
        return T.And(line < m, place < n)

    return Results(
        matrix.dtype,
        matrix.buffer,
        tensor_map,
        coords,
        index,
        value,
        addends,
        inside,
        is_swapped,
        width,
        lines,
        in_pairs,
    )


def chunk_shape(block_n: int, *, is_swapped: bool) -> tuple[int, int]:
    """Return the elements of a line and the lines that leave at once, of a slab of 64 rows and so many columns."""
    columns = block_n if is_swapped and block_n <= SLAB else math.gcd(block_n, SLAB)
    return (SLAB, columns) if is_swapped else (columns, SLAB)


def _place(results: Results, line: Any, piece: Any) -> Any:
    """Return where in a chunk 8 elements of a line lie: as the swizzle of so long lines permutes them."""
    pieces = results.width // 8
    return line * results.width + T.bitwise_xor(piece, line * results.width // SLAB % pieces) * 8


def keep(buffers: Sequence[Any], at: Any, values: Sequence[Any]) -> None:
    """Store values at one place, each in its buffer."""
    for buffer, value in zip(buffers, values, strict=True):
        T.buffer_store(buffer, value, [at])


@T.inline
def fetch(results: Results, addends, first, at, lanes):
    """Have a warpgroup load what the epilogue adds to a chunk, all of it at once: from place `first` on, in the order of filling."""
    batch, row, column = each(at)
    warp, lane = each(lanes)
    for number in T.unroll(results.chunk_elements // 256):
        x = T.meta_var(row + warp * 16 + number % 2 * 8 + lane // 4)
        y = T.meta_var(column + number // 2 * 8 + (lane % 4) * 2)
        if results.in_pairs and not results.is_swapped:
            for v in T.vectorized(2):
                keep(addends, first + number * 2 + v, results.addends(batch, x, y + v))
        else:
            for v in T.unroll(2):
                keep(addends, first + number * 2 + v, results.addends(batch, x, y + v))


@T.inline
def fill(results: Results, acc, addends, packed, buffer, firsts, at, lanes):
    """Have a warpgroup write a chunk of results to shared memory; `firsts` are the places of its first sum and of what that is added to.

    `at` is its batch, row and column.
    """
    first, first_addend = each(firsts)
    batch, row, column = each(at)
    warp, lane = each(lanes)
    columns = T.meta_var(results.lines if results.is_swapped else results.width)
    count = T.meta_var(4 if columns % 16 == 0 else 2)
    for j in T.unroll(columns // (4 * count)):
        for q in T.unroll(count):
            half = T.meta_var(q % 2)
            block = T.meta_var(j * (count // 2) + q // 2)
            i = T.meta_var(first + block * 4 + half * 2)
            x = T.meta_var(row + warp * 16 + half * 8 + lane // 4)
            y = T.meta_var(column + block * 8 + (lane % 4) * 2)
            if acc.pair(i) is not None and results.keeps(acc[i]):
                packed[q] = acc.pair(i)
            else:
                T.ptx[f"cvt.rn.{'bf16' if results.dtype == 'bfloat16' else 'f16'}x2.f32"](
                    packed[q],
                    results.wide(acc[i + 1], batch, x, y + 1, [addend[i - first + first_addend + 1] for addend in addends]),
                    results.wide(acc[i], batch, x, y, [addend[i - first + first_addend] for addend in addends]),
                )
        matrix = T.meta_var(lane // 8)
        if results.is_swapped:
            T.ptx[STMATRIX.format(count, ".trans")](
                buffer.ptr_to([_place(results, (j * (count // 2) + matrix // 2 % (count // 2)) * 8 + lane % 8, warp * 2 + matrix % 2)]),
                *[packed[q] for q in range(count)],
            )
        else:
            T.ptx[STMATRIX.format(count, "")](
                buffer.ptr_to([_place(results, warp * 16 + lane % 16, j * (count // 2) + matrix // 2 % (count // 2))]),
                *[packed[q] for q in range(count)],
            )


@T.inline
def copy_out(results: Results, buffer, at, lanes):
    """Have a warpgroup store a chunk from shared memory, lines spread over lanes: in pairs, else one element after the other."""
    batch, row, column = each(at)
    warp, lane = each(lanes)
    for r in T.unroll(results.lines // 4):
        line = T.meta_var(r * 4 + warp)
        if lane < results.width // 2:
            if results.in_pairs:
                pair = T.meta_var(lane * 2)
                x = T.meta_var(row + pair if results.is_swapped else row + line)
                y = T.meta_var(column + line if results.is_swapped else column + pair)
                place = T.meta_var(_place(results, line, lane // 4) + pair % 8)
                if results.inside(x, y):
                    for v in T.vectorized(2):
                        xv = T.meta_var(x + v if results.is_swapped else x)
                        yv = T.meta_var(y if results.is_swapped else y + v)
                        results.buffer[tuple(results.index(batch, xv, yv))] = buffer[place + v]
            else:
                for half in T.unroll(2):
                    # Neighbours are stored at once, so that L2 takes whole sectors.
                    element = T.meta_var(half * (results.width // 2) + lane)
                    x = T.meta_var(row + element if results.is_swapped else row + line)
                    y = T.meta_var(column + line if results.is_swapped else column + element)
                    if results.inside(x, y):
                        results.buffer[tuple(results.index(batch, x, y))] = buffer[_place(results, line, element // 8) + element % 8]


@T.inline
def store_sums(results: Results, acc, count, at, lanes):
    """Have each thread store its own results, `count` of them from the tile's beginning."""
    batch, row, column = each(at)
    warp, lane = each(lanes)
    for block in T.unroll(count // 4):
        for half in T.unroll(2):
            x = T.meta_var(row + warp * 16 + half * 8 + lane // 4)
            y = T.meta_var(column + block * 8 + (lane % 4) * 2)
            if results.in_pairs and not results.is_swapped:
                if results.inside(x, y):
                    for v in T.vectorized(2):
                        results.buffer[tuple(results.index(batch, x, y + v))] = results.element(
                            acc[block * 4 + half * 2 + v], batch, x, y + v
                        )
            else:
                for v in T.unroll(2):
                    yv = T.meta_var(column + block * 8 + (lane % 4) * 2 + v)
                    if results.inside(x, yv):
                        results.buffer[tuple(results.index(batch, x, yv))] = results.element(acc[block * 4 + half * 2 + v], batch, x, yv)
