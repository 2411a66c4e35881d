"""Owns a GEMM as BLAS takes it: matrices in column-major order, each plain or transposed.

Knows nothing of any one library, of how it is called or of epilogues.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
