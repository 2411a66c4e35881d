"""Owns the function that computes a GEMM by OpenBLAS: parts of the result in the threads of our pool, each with its epilogue behind it.

Knows nothing of which GEMMs are given to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.ir import Var

from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.read_gemm import GemmProblem
from kerneldecl.templates.shared.column_major import Product, Stored
from kerneldecl.templates.shared.vendor_call import vendor_call
from kerneldecl.toolchain.companions import OPENBLAS_GEMM, OPENBLAS_READY

_VECTOR_BYTES = 64
_UNIT = 16
"""Parts are multiples of this long, as OpenBLAS's register tiles are at most, and vectors of the epilogue."""
_PART_POINTS = 1 << 16
"""Multiplications that are worth a thread: some microseconds."""


class _Part(NamedTuple):
    """A part of the product, in column-major order; its places are expressions of the task's number."""

    batch: Any
    row: Any
    column: Any
    rows: Any
    columns: Any


def openblas_gemm(problem: GemmProblem, product: Product, version: str, cores: int) -> Any | None:
    """Return the statements that compute a GEMM on so many cores; None for dtypes that OpenBLAS does not know."""
    if {*product.dtypes, problem.contraction.accum_dtype} not in ({"float32"}, {"float64"}):
        return None
    task = Var("task", "int32")
    tasks, part = _parts(product, cores, task)
    body = _call(product, part)
    epilogue = _epilogue(problem, product, part)
    body = body if epilogue is None else tirx.SeqStmt([body, epilogue])
    return tirx.SeqStmt([vendor_call(OPENBLAS_READY, version), tirx.For(task, 0, tasks, tirx.ForKind.PARALLEL, body)])


def _parts(product: Product, cores: int, task: Any) -> tuple[int, _Part]:
    """Return how many parts there are, and that of a task: whole GEMMs of a batch, or each cut along its longer side."""
    batch, m, n, k = product.extents
    wanted = min(-(-cores // batch), max(1, m * n * k // _PART_POINTS))
    longer = max(m, n)
    length = -(-longer // (wanted * _UNIT)) * _UNIT
    count = -(-longer // length)
    start = task % count * length
    rest = min(longer, length) if longer % length == 0 or count == 1 else tirx.min(longer - start, length)
    place, at = task // count, tirx.const(0, "int32")
    return batch * count, _Part(place, start, at, rest, n) if m >= n else _Part(place, at, start, m, rest)


def _call(product: Product, part: _Part) -> Any:
    a, b, d = product.a, product.b, product.d
    batch, row, column = map(_wide, (part.batch, part.row, part.column))
    offsets = (
        batch * a.batch_stride + row * (a.pitch if a.is_transposed else 1),
        batch * b.batch_stride + column * (1 if b.is_transposed else b.pitch),
        batch * d.batch_stride + column * d.pitch + row,
    )
    described = (dtype_bytes(product.dtypes[0]), *offsets, a.is_transposed, b.is_transposed)
    sizes = (_wide(part.rows), _wide(part.columns), product.extents[3], a.pitch, b.pitch, d.pitch)
    return vendor_call(OPENBLAS_GEMM, *(_data(each) for each in (a, b, d)), *described, *sizes, can_fail=False)


def _data(matrix: Stored) -> Any:
    return matrix.buffer.data


def _wide(value: Any) -> Any:
    return value if isinstance(value, int) else tirx.Cast("int64", value)


def _epilogue(problem: GemmProblem, product: Product, part: _Part) -> Any | None:
    """Return loops that make the epilogue of a part in place; None where there is nothing to do."""
    outer, inner, lane = (Var(name, "int32") for name in ("outer", "inner", "lane"))
    lanes = _VECTOR_BYTES // dtype_bytes(product.dtypes[2])
    width = lanes if product.extents[1] % lanes == 0 else 1
    row, column = part.row + (inner * width + lane if width > 1 else inner), part.column + outer
    place = (part.batch, *((row, column) if product.is_swapped else (column, row)))
    index = problem.index_out(*place)
    total = problem.out.buffer[tuple(index)]
    value = problem.value(total, *place, problem.aux(*place))
    if value.same_as(total):
        return None
    stored = tirx.BufferStore(problem.out.buffer, value, index)
    if width > 1:
        stored = tirx.For(lane, 0, width, tirx.ForKind.VECTORIZED, stored)
    rows = part.rows // width if width > 1 else part.rows
    return tirx.For(outer, 0, part.columns, tirx.ForKind.SERIAL, tirx.For(inner, 0, rows, tirx.ForKind.SERIAL, stored))
