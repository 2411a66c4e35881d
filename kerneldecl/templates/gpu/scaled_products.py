"""Owns a GEMM of scaled values as sums of products of values, which are scaled by k-tiles.

Knows nothing of schedules, tensor cores or policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.s_tir import SBlock, SBlockRealize
from tvm.script import tirx as T  # noqa: N812  # TVM's name
from tvm.sym import Analyzer

from kerneldecl.analysis.scaled_gemm import VALUE_DTYPE
from kerneldecl.compiler.canonical import canonical_module
from kerneldecl.templates.gpu.read_scaled import Element, ScaledGemm, exact_value

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

    def inside(self, value: Any, axis: int, row: Any, place: Any) -> Any:
        """Return an element of the operand with axis m (0) or n (1), zero beyond it."""
        (size, padded), (k, padded_k) = ((self.gemm.extents[at], self.padded[at]) for at in (axis, 2))
        bounds = [row < size] * (padded != size) + [place < k] * (padded_k != k)
        return tirx.if_then_else(tirx.all(*bounds), value, tirx.const(0, str(value.ty.dtype))) if bounds else value

    def factor(self, row: Any, column: Any, place: Any) -> Any:
        """Return the factor of a k-tile's sum, any beyond the operands."""
        at = [
            index if padded == size else tirx.min(index, size - 1)
            for index, size, padded in zip((row, column, place), self.gemm.extents, self.padded, strict=True)
        ]
        scales = [operand.scale(at[axis], at[2]) for axis, operand in enumerate((self.gemm.a, self.gemm.b)) if operand.scale is not None]
        return scales[0] if len(scales) == 1 else scales[0] * scales[1] if scales else tirx.const(1.0, "float32")


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
    found: list[Any] = []

    def visit(load: Any) -> Any:
        found.append(load)
        return load

    tvm_ffi.structural_map(expr, [(TensorLoad, visit)], order="pre")
    return found


def by_k_tiles(tiles: KTiles) -> tvm.IRModule:
    """Return the computation in whole tiles, by k-tiles.

    Blocks are `stored`, A as it is, `left` and `right`, values in VALUE_DTYPE, `products` [k-tiles, m, n], `scaled` [m, n], which adds up
    their scaled sums, `sums`, and those behind the GEMM.
    """
    gemm, sums = tiles.gemm, tiles.gemm.sums
    (m, n, _), (rows, columns, depth) = ([T.int64(size) for size in sizes] for sizes in (gemm.extents, tiles.padded))
    count, block_k = T.int64(tiles.count), T.int64(tiles.tile[2])

    @T.prim_func(s_tir=True, check_well_formed=False)
    def computed() -> None:
        stored = T.sblock_alloc_buffer((rows, depth), gemm.a.stored.dtype)
        left = T.sblock_alloc_buffer((rows, depth), VALUE_DTYPE)
        right = T.sblock_alloc_buffer((columns, depth), VALUE_DTYPE)
        products = T.sblock_alloc_buffer((count, rows, columns), "float32")
        scaled = T.sblock_alloc_buffer((rows, columns), "float32")
        for i, x in T.grid(rows, depth):
            with T.sblock("stored"):
                vi, vx = T.axis.remap("SS", [i, x])
                T.reads(gemm.a.stored[vi, vx])
                T.writes(stored[vi, vx])
                stored[vi, vx] = tiles.inside(gemm.a.stored[vi, vx], 0, vi, vx)
        for i, x in T.grid(rows, depth):
            with T.sblock("left"):
                vi, vx = T.axis.remap("SS", [i, x])
                left[vi, vx] = exact_value(stored[vi, vx])
        for j, x in T.grid(columns, depth):
            with T.sblock("right"):
                vj, vx = T.axis.remap("SS", [j, x])
                value = T.meta_var(tiles.inside(gemm.b.values(vj, vx), 1, vj, vx))
                T.reads(*_loads(value))
                T.writes(right[vj, vx])
                right[vj, vx] = value
        for t, i, j, x in T.grid(count, rows, columns, block_k):
            with T.sblock("products"):
                vt, vi, vj, vx = T.axis.remap("SSSR", [t, i, j, x])
                with T.init():
                    products[vt, vi, vj] = T.float32(0)
                at = T.meta_var(vt * block_k + vx)
                products[vt, vi, vj] = products[vt, vi, vj] + T.Cast("float32", left[vi, at]) * T.Cast("float32", right[vj, at])
        for i, j, t in T.grid(rows, columns, count):
            with T.sblock("scaled"):
                vi, vj, vt = T.axis.remap("SSR", [i, j, t])
                factor = T.meta_var(tiles.factor(vi, vj, vt * block_k))
                T.reads(products[vt, vi, vj], *_loads(factor))
                T.writes(scaled[vi, vj])
                with T.init():
                    scaled[vi, vj] = T.float32(0)
                scaled[vi, vj] = scaled[vi, vj] + products[vt, vi, vj] * factor
        for i, j in T.grid(m, n):
            with T.sblock("sums"):
                vi, vj = T.axis.remap("SS", [i, j])
                T.reads(scaled[vi, vj])
                T.writes(sums[vi, vj])
                sums[vi, vj] = scaled[vi, vj]

    root = computed.body.block
    own = [sums] * (not any(sums.same_as(param) for param in gemm.func.params))
    whole = SBlock([], [], [], "root", tirx.SeqStmt([*root.body.seq, *gemm.rest]), alloc_buffers=[*root.alloc_buffers, *own, *gemm.buffers])
    return canonical_module(tirx.PrimFunc(list(gemm.func.params), SBlockRealize([], True, whole)))
