"""Owns a GEMM of scaled operands as a GEMM of unscaled ones, whose accumulators of each k-tile are scaled.

Knows nothing of schedules, tensor cores or policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.script import tirx as T  # noqa: N812  # TVM's name
from tvm.sym import Analyzer

from kerneldecl.analysis.scaled_gemm import INTEGER_DTYPE, VALUE_DTYPE
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.templates.gpu.read_scaled import Element, ScaledGemm, exact_value
from kerneldecl.templates.gpu.value_words import WORD_DTYPE, WORD_VALUES, Words

# TVMScript has its own decorators.
# mypy: disable-error-code="untyped-decorator"


@dataclass(frozen=True)
class KTiles:
    """A GEMM of scaled values in whole tiles."""

    gemm: ScaledGemm
    tile: tuple[int, int, int]
    """Rows, columns and elements along k of a tile."""
    split_k: int
    """Parts of k, all of as many k-tiles."""
    dtype: str = VALUE_DTYPE
    """In which values are multiplied."""
    words: Words | None = None
    """What makes four of B's values together, None where each is made by itself."""

    @property
    def sum_dtype(self) -> str:
        """Return the dtype of the sums of a k-tile."""
        return "int32" if self.dtype == INTEGER_DTYPE else "float32"

    @property
    def count(self) -> int:
        """Return the number of k-tiles."""
        return -(-self.gemm.extents[2] // (self.tile[2] * self.split_k)) * self.split_k

    @property
    def padded(self) -> tuple[int, int, int]:
        """Return the extents of m, n and k in whole tiles."""
        m, n, _ = self.gemm.extents
        block_m, block_n, block_k = self.tile
        return -(-m // block_m) * block_m, -(-n // block_n) * block_n, self.count * block_k

    @property
    def shares_scales(self) -> bool:
        """Say whether the elements of each k-tile of a row share a scale."""
        m, n, k = self.gemm.extents
        return _is_constant(self.gemm.a.scale, m, k, self.tile[2]) and _is_constant(self.gemm.b.scale, n, k, self.tile[2])

    def stored(self, row: Any, place: Any) -> Any:
        """Return a value of A as it is stored: beyond its rows any, of which no result depends, and beyond k zero."""
        m, _, k = self.gemm.extents
        value = self.gemm.a.stored[row if self.padded[0] == m else tirx.min(row, m - 1), place]
        return value if self.padded[2] == k else tirx.if_then_else(place < k, value, tirx.const(0, str(value.ty.dtype)))

    def weight(self, column: Any, place: Any) -> Any:
        """Return a value of B, zero beyond it."""
        _, n, k = self.gemm.extents
        bounds = [column < n] * (self.padded[1] != n) + [place < k] * (self.padded[2] != k)
        value = self.gemm.b.values(column, place)
        return tirx.if_then_else(tirx.all(*bounds), value, tirx.const(0, self.dtype)) if bounds else value

    def scale(self, axis: int, row: Any, place: Any) -> Any:
        """Return the scale of a k-tile of A (axis 0) or B (axis 1) that begins at a place, any beyond them; 1 where there is none."""
        scale = (self.gemm.a, self.gemm.b)[axis].scale
        if scale is None:
            return tirx.const(1.0, "float32")
        sizes = ((row, axis), (place, 2))
        at = [
            index if self.padded[axis] == self.gemm.extents[axis] else tirx.min(index, self.gemm.extents[axis] - 1) for index, axis in sizes
        ]
        return scale(*at)


def _is_constant(scale: Element | None, rows: int, k: int, block_k: int) -> bool:
    if scale is None:
        return True
    row, tile, inner = (tirx.Var(name, "int64") for name in ("row", "tile", "inner"))
    analyzer = Analyzer()
    for var, extent in ((row, rows), (tile, -(-k // block_k)), (inner, block_k)):
        analyzer.bind(var, tvm.ir.Range(T.int64(0), T.int64(extent)))
    begin = tile * T.int64(block_k)
    return bool(tvm_ffi.structural_equal(analyzer.simplify(scale(row, begin + inner)), analyzer.simplify(scale(row, begin))))


def _loads(expr: Any) -> list[Any]:
    """Return what an expression loads, each element once: a block names what it reads once."""
    found: list[Any] = []

    def visit(load: Any) -> Any:
        if not any(tvm_ffi.structural_equal(load, other) for other in found):
            found.append(load)
        return load

    tvm_ffi.structural_map(expr, [(TensorLoad, visit)], order="pre")
    return found


@T.inline
def _assign(to, value) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    T.reads(*_loads(value))
    T.writes(to)
    to.source[*to.indices] = value


class _Buffers(NamedTuple):
    """What is computed between the arguments and the sums."""

    stored: Any
    left: Any
    right: Any
    products: Any
    left_scales: Any
    right_scales: Any
    scaled: Any

    @classmethod
    def of(cls, tiles: KTiles) -> _Buffers:
        rows, columns, depth = (T.int64(size) for size in tiles.padded)
        count, stored = T.int64(tiles.count), str(tiles.gemm.a.stored.dtype)
        shapes = (rows, depth), (rows, depth), (columns, depth), (count, rows, columns), (count, rows), (count, columns), (rows, columns)
        dtypes = stored, tiles.dtype, tiles.dtype, tiles.sum_dtype, *["float32"] * 3
        named = zip(cls._fields, shapes, dtypes, strict=True)
        return cls(*(tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in named))


def by_k_tiles(tiles: KTiles) -> tvm.IRModule:
    """Return the computation in whole tiles, by k-tiles.

    Blocks are `stored`, A as it is, `left` and `right`, values, `products` [k-tiles, m, n], `left_scales` [k-tiles, m],
    `right_scales` [k-tiles, n], `scaled` [m, n], which adds up the scaled sums, `sums`, and those behind the GEMM.
    """
    gemm, buffers = tiles.gemm, _Buffers.of(tiles)
    rows, depth = buffers.right.shape
    words = [tirx.decl_buffer((rows, depth // T.int64(WORD_VALUES)), WORD_DTYPE, "right_words")] * (tiles.words is not None)
    right = _right_of_words(tiles.words, words[0], buffers.right) if tiles.words else _right(tiles, buffers.right)
    body = [*_values(tiles, buffers), *right, *_products(tiles, buffers), *_scales(tiles, buffers), *_sums(tiles, buffers), *gemm.rest]
    own = [gemm.sums] * (not any(gemm.sums.same_as(param) for param in gemm.func.params))
    whole = SBlock([], [], [], "root", tirx.SeqStmt(body), alloc_buffers=[*buffers, *words, *own, *gemm.buffers])
    return canonical_module(tirx.PrimFunc(list(gemm.func.params), SBlockRealize([], True, whole)))


def _statements(func: Any) -> list[Any]:
    body = func.body.block.body
    return list(body.seq) if isinstance(body, tirx.SeqStmt) else [body]


def _values(tiles: KTiles, buffers: _Buffers) -> list[Any]:
    """Make A's operand of values, from a copy of what is stored."""
    stored, left = buffers[:2]
    dtype = tiles.dtype

    @T.prim_func(s_tir=True, check_well_formed=False)
    def values() -> None:
        for i, x in T.grid(*left.shape):
            with T.sblock("stored"):
                vi, vx = T.axis.remap("SS", [i, x])
                _assign(stored[vi, vx], tiles.stored(vi, vx))
        for i, x in T.grid(*left.shape):
            with T.sblock("left"):
                vi, vx = T.axis.remap("SS", [i, x])
                _assign(left[vi, vx], exact_value(stored[vi, vx], dtype))

    return _statements(values)


def _right(tiles: KTiles, right: Any) -> list[Any]:
    """Make B's operand of values, from its arguments."""

    @T.prim_func(s_tir=True, check_well_formed=False)
    def values() -> None:
        for j, x in T.grid(*right.shape):
            with T.sblock("right"):
                vj, vx = T.axis.remap("SS", [j, x])
                _assign(right[vj, vx], tiles.weight(vj, vx))

    return [values.body.block.body]


def _right_of_words(words: Words, buffer: Any, right: Any) -> list[Any]:
    """Make B's operand of words, and those of its arguments."""
    bits, count = 8, T.int64(WORD_VALUES)

    @T.prim_func(s_tir=True, check_well_formed=False)
    def values() -> None:
        for j, x in T.grid(*buffer.shape):
            with T.sblock("words"):
                vj, vx = T.axis.remap("SS", [j, x])
                T.reads(words.read(vj, vx))
                T.writes(buffer[vj, vx])
                buffer[vj, vx] = words.at(vj, vx)
        for j, x in T.grid(*right.shape):
            with T.sblock("right"):
                vj, vx = T.axis.remap("SS", [j, x])
                _assign(right[vj, vx], T.Cast("int8", buffer[vj, vx // count] >> T.Cast(WORD_DTYPE, vx % count * T.int64(bits))))

    return _statements(values)


def _products(tiles: KTiles, buffers: _Buffers) -> list[Any]:
    """Return the GEMM of a k-tile, into accumulators of its own."""
    _, left, right, products, *_ = buffers
    block_k, dtype = T.int64(tiles.tile[2]), tiles.sum_dtype

    @T.prim_func(s_tir=True, check_well_formed=False)
    def added() -> None:
        for t, i, j, x in T.grid(*products.shape, block_k):
            with T.sblock("products"):
                vt, vi, vj, vx = T.axis.remap("SSSR", [t, i, j, x])
                at = T.meta_var(vt * block_k + vx)
                T.reads(left[vi, at], right[vj, at])
                T.writes(products[vt, vi, vj])
                with T.init():
                    products[vt, vi, vj] = tirx.const(0, dtype)
                products[vt, vi, vj] = products[vt, vi, vj] + T.Cast(dtype, left[vi, at]) * T.Cast(dtype, right[vj, at])

    return _statements(added)


def _scales(tiles: KTiles, buffers: _Buffers) -> list[Any]:
    """Copy the scales of each k-tile's rows and columns."""
    left_scales, right_scales, block_k = buffers.left_scales, buffers.right_scales, T.int64(tiles.tile[2])

    @T.prim_func(s_tir=True, check_well_formed=False)
    def scales() -> None:
        for t, i in T.grid(*left_scales.shape):
            with T.sblock("left_scales"):
                vt, vi = T.axis.remap("SS", [t, i])
                _assign(left_scales[vt, vi], tiles.scale(0, vi, vt * block_k))
        for t, j in T.grid(*right_scales.shape):
            with T.sblock("right_scales"):
                vt, vj = T.axis.remap("SS", [t, j])
                _assign(right_scales[vt, vj], tiles.scale(1, vj, vt * block_k))

    return _statements(scales)


def _sums(tiles: KTiles, buffers: _Buffers) -> list[Any]:
    """Scale the sums of k-tiles, and add them up."""
    *_, products, left_scales, right_scales, scaled = buffers
    sums, count = tiles.gemm.sums, products.shape[0]
    is_wide = tiles.sum_dtype == "float32"
    m, n, _ = (T.int64(size) for size in tiles.gemm.extents)

    @T.prim_func(s_tir=True, check_well_formed=False)
    def added() -> None:
        for i, j, t in T.grid(*scaled.shape, count):
            with T.sblock("scaled"):
                vi, vj, vt = T.axis.remap("SSR", [i, j, t])
                T.reads(products[vt, vi, vj], left_scales[vt, vi], right_scales[vt, vj])
                T.writes(scaled[vi, vj])
                with T.init():
                    scaled[vi, vj] = T.float32(0)
                product = T.meta_var(products[vt, vi, vj] if is_wide else T.Cast("float32", products[vt, vi, vj]))
                scaled[vi, vj] = scaled[vi, vj] + product * (left_scales[vt, vi] * right_scales[vt, vj])
        for i, j in T.grid(m, n):
            with T.sblock("sums"):
                vi, vj = T.axis.remap("SS", [i, j])
                _assign(sums[vi, vj], scaled[vi, vj])

    return _statements(added)
