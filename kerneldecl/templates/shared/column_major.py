"""Owns a GEMM as BLAS takes it: matrices in column-major order, each plain or transposed, with the epilogues that libraries know.

Knows nothing of any one library or of how it is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad, Var

from kerneldecl.templates.hopper.read_gemm import Dim, GemmProblem, Matrix


class Stored(NamedTuple):
    """A matrix as it lies in memory."""

    buffer: Any
    is_transposed: bool
    pitch: int
    """BLAS's leading dimension: elements from one column to the next."""
    batch_stride: int


class Product(NamedTuple):
    """D = A B in column-major order, D of m rows and n columns. A is the operand along whose axis the result is contiguous."""

    a: Stored
    b: Stored
    d: Stored
    extents: tuple[int, int, int, int]
    """Extents of batch, m, n, k."""
    dtypes: tuple[str, str, str]
    """Of A, B and D."""
    is_swapped: bool
    """Whether A is the operand that the GEMM's own m indexes, as the result is contiguous along that."""


class FusedSteps(NamedTuple):
    """An epilogue of the steps that libraries know: D = activation(A B + add + bias)."""

    add: Any | None = None
    """The buffer of an operand of the result's shape."""
    bias: Any | None = None
    """The buffer of a vector along the result's contiguous axis."""
    is_relu: bool = False


def product_of(problem: GemmProblem) -> Product | None:
    """Return a GEMM as BLAS takes it; None where a matrix has no contiguous axis, or where the batch has several strides."""
    a, b, out = problem.a, problem.b, problem.out
    if any(len(matrix.batch) > 1 for matrix in (a, b, out)):
        return None
    is_swapped = out.columns[1] != 1
    inner, outer = (a, b) if is_swapped else (b, a)
    rows, columns = (out.rows, out.columns) if is_swapped else (out.columns, out.rows)
    stored = (_stored(inner, inner.rows, inner.columns), _stored(outer, outer.columns, outer.rows), _stored(out, rows, columns))
    if stored[0] is None or stored[1] is None or stored[2] is None or stored[2].is_transposed:
        return None
    batch = out.batch[0][0] if out.batch else 1
    return Product(*stored, (batch, rows[0], columns[0], inner.columns[0]), (inner.dtype, outer.dtype, out.dtype), is_swapped)  # type: ignore[arg-type]  # none is None


def _stored(matrix: Matrix, rows: Dim, columns: Dim) -> Stored | None:
    """Return a matrix of so many rows and columns in column-major order; None where neither is contiguous."""
    stride = matrix.batch[0][1] if matrix.batch else 0
    if rows[1] == 1:
        return Stored(matrix.buffer, is_transposed=False, pitch=max(columns[1], rows[0]), batch_stride=stride)
    if columns[1] == 1:
        return Stored(matrix.buffer, is_transposed=True, pitch=max(rows[1], columns[0]), batch_stride=stride)
    return None


def fused_steps(problem: GemmProblem, product: Product) -> FusedSteps | None:
    """Return a GEMM's epilogue as steps that libraries know; None where it computes anything else."""
    place = Var("batch", "int32"), Var("row", "int32"), Var("column", "int32")
    total = Var("total", problem.contraction.accum_dtype)
    loads = problem.aux(*place)
    values = [Var(f"aux{number}", str(load.ty.dtype)) for number, load in enumerate(loads)]
    expr = _uncast(problem.value(total, *place, values))
    is_relu = isinstance(expr, tirx.Max) and _is_zero(expr.b)
    terms = _terms(expr.a if is_relu else expr)
    if sum(term.same_as(total) for term in terms) != 1 or len(terms) != 1 + len(values):
        return None
    steps = FusedSteps(is_relu=is_relu)
    inner = place[1 if product.is_swapped else 2]
    for load in (loads[at] for at in _positions(terms, values)):
        if steps.bias is None and _reads(load, [inner]) and len(load.source.shape) == 1:
            steps = steps._replace(bias=load.source)
        elif steps.add is None and _is_like(load, problem.out.buffer) and _reads(load, problem.index_out(*place)):
            steps = steps._replace(add=load.source)
        else:
            return None
    return steps


def _positions(terms: Sequence[Any], values: Sequence[Any]) -> list[int]:
    """Return which of the values each term is, those that are none left out."""
    return [at for term in terms for at, value in enumerate(values) if term.same_as(value)]


def _terms(expr: Any) -> list[Any]:
    """Return the terms of a sum, without casts that widen them."""
    plain = _uncast(expr)
    return [*_terms(plain.a), *_terms(plain.b)] if isinstance(plain, tirx.Add) else [plain]


def _uncast(expr: Any) -> Any:
    return expr.value if isinstance(expr, tirx.Cast) else expr


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, tirx.FloatImm | tirx.IntImm) and expr.value == 0


def _reads(load: Any, index: Sequence[Any]) -> bool:
    """Say whether a load reads a buffer at an index, whatever the width of either."""
    found = [_plain(each) for each in load.indices]
    wanted = [_plain(each) for each in index]
    return isinstance(load, TensorLoad) and len(found) == len(wanted) and all(map(tvm_ffi.structural_equal, found, wanted))


def _plain(index: Any) -> Any:
    """Return an index without casts and without additions of zero."""
    plain = _uncast(tirx.convert(index))
    if isinstance(plain, tirx.Add) and _is_zero(plain.a):
        return _plain(plain.b)
    return plain


def _is_like(load: Any, buffer: Any) -> bool:
    shapes = [[int(extent) for extent in each.shape] for each in (load.source, buffer)]
    return shapes[0] == shapes[1] and str(load.source.dtype) == str(buffer.dtype)
