"""Owns the reading of a product for kernels that address memory themselves: where its matrices lie, what becomes of each sum.

Knows nothing of tiles, instructions or targets.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Range, TensorLoad, Var
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import ScheduleError
from tvm.sym import Analyzer, detect_linear_equation

from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.compiler import tfloat32
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.shared.contraction import epilogue_of, merge, only_reduction
from kerneldecl.templates.shared.fast_math import with_fast_activations

Dim = tuple[int, int]
"""Extent and stride in elements."""


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices in memory. Of operands, the rows are what m or n indexes and the columns what k does."""

    buffer: Any
    dtype: str
    """That it is read as: of operands the buffer's own, or tfloat32 for float32."""
    rows: Dim
    columns: Dim
    batch: tuple[Dim, ...] = ()
    """Outermost first."""

    @property
    def item_bytes(self) -> int:
        return dtype_bytes(self.dtype)

    def batch_index(self, flat: Any) -> list[Any]:
        """Return the index along each dimension of the batch, innermost first."""
        index = []
        for extent, _ in reversed(self.batch):
            index.append(flat % extent)
            flat = flat // extent
        return index


@dataclass(frozen=True)
class Product:
    """C[batch, m, n] = epilogue(sum over k of A[batch, m, k] * B[batch, n, k]), on buffers of its own."""

    contraction: Contraction
    params: tuple[Any, ...]
    a: Matrix
    b: Matrix
    out: Matrix
    index_out: Callable[[Any, Any, Any], list[Any]]
    """(batch, m, n) -> indices of the result's buffer."""
    value: Callable[[Any, Any, Any, Any, Sequence[Any]], Any]
    """(sum, batch, m, n, what the operands of the epilogue are there) -> what is stored there."""
    addends: Callable[[Any, Any, Any], list[Any]]
    """(batch, m, n) -> the loads of the epilogue's operands, such as a bias."""

    @property
    def extents(self) -> tuple[int, int, int, int]:
        return self.contraction.extents


@dataclass(frozen=True)
class Epilogue:
    """What becomes of a sum: an expression on loads of it and of other buffers, the addends."""

    expr: Any
    """None where the sum itself is stored."""
    sums: Any
    loads: tuple[Any, ...]
    fresh: dict[Any, Any]

    @classmethod
    def of(cls, expr: Any, sums: Any, fresh: dict[Any, Any]) -> Epilogue:
        """Return the epilogue that an expression is, `fresh` being the buffers that stand for a function's."""
        return cls(expr, sums, () if expr is None else tuple(_loads_of(expr, sums)), fresh)

    def value(self, total: Any, places: dict[Any, Any], addends: Sequence[Any]) -> Any:
        """Return what is stored, given the sum, where it is and what the addends are there."""
        if self.expr is None:
            return total
        return _replaced(self.expr, self.sums, total, dict(zip(self.loads, addends, strict=True)), self._known(places))

    def addends(self, places: dict[Any, Any]) -> list[Any]:
        """Return the loads of the addends of one place."""
        return [_narrowed(_replaced(load, None, None, {}, self._known(places))) for load in self.loads]

    def _known(self, places: dict[Any, Any]) -> dict[Any, Any]:
        return {**self.fresh, **{var: tirx.Cast(var.ty.dtype, tirx.const(0, "int32") + place) for var, place in places.items()}}


def read_product(mod: tvm.IRModule) -> Product | None:
    """Return the product that a module's function is, None where it is none or where its memory has no strides."""
    sch = Schedule(mod)
    block = only_reduction(sch)
    epilogue = None if block is None else epilogue_of(sch, block)
    if epilogue is None:
        return None
    if epilogue:
        merge(sch, epilogue)
    while producers := sch.get_producers(block):
        try:
            sch.compute_inline(producers[0])
        except ScheduleError:
            return None
    with contextlib.suppress(ValueError):
        contraction = contraction_of(iter_space(sch.mod))
        if isinstance(contraction, Contraction) and contraction.is_plain:
            return _read(sch, sch.get(block), sch.get(epilogue[-1]) if epilogue else None, contraction)
    return None


def _read(sch: Schedule, block: Any, last: Any, contraction: Contraction) -> Product | None:
    func = sch.mod["main"]
    fresh = {param: tirx.decl_buffer([int(extent) for extent in param.shape], param.dtype, param.name) for param in func.params}
    axes = _Axes(block)
    total = block.body.value
    gemm = _uncast(total.b if _is_load_of(total.a, block.body.buffer) else total.a)
    truncated = [tfloat32.read_by(operand) for operand in (gemm.a, gemm.b)]
    operands = [_uncast(operand) if load is None else load for operand, load in zip((gemm.a, gemm.b), truncated, strict=True)]
    stored = last.body if last is not None else block.body
    if any(load.source not in fresh for load in operands) or stored.buffer not in fresh:
        return None
    # What follows reads the sums at its own axes, in some order: each of them is an axis of the product.
    origin = dict(zip(stored.indices, block.body.indices, strict=True)) if last is not None else {}
    order = {var: axes.position(origin.get(var, var)) for var in stored.indices}
    m, n, k, batch = contraction.m, contraction.n, contraction.k, contraction.batch
    a, b = (operands[operand.position] for operand in (contraction.a, contraction.b))
    out = {at: stride for stride, at in zip(_dense(stored.buffer.shape), order.values(), strict=True) if at is not None}
    matrices: list[Any] = [
        axes.matrix(fresh[a.source], contraction.a.dtype, axes.strides(a), (m, k, batch)),
        axes.matrix(fresh[b.source], contraction.b.dtype, axes.strides(b), (n, k, batch)),
        axes.matrix(fresh[stored.buffer], str(stored.buffer.dtype), out, (m, n, batch)),
    ]
    if any(matrix is None for matrix in matrices):
        return None

    def values(flat_batch: Any, row: Any, column: Any) -> dict[int, Any]:
        return {at: value for group, flat in ((batch, flat_batch), (m, row), (n, column)) for at, value in axes.unflat(group, flat)}

    def index_out(flat_batch: Any, row: Any, column: Any) -> list[Any]:
        found = values(flat_batch, row, column)
        return [found[at] if at is not None else 0 for at in order.values()]

    epilogue = Epilogue.of(
        None if last is None else with_fast_activations(stored.value, str(stored.buffer.dtype)), block.body.buffer, fresh
    )

    def places(flat_batch: Any, row: Any, column: Any) -> dict[Any, Any]:
        found = values(flat_batch, row, column)
        return {var: found[at] for var, at in order.items() if at is not None}

    def value(total: Any, flat_batch: Any, row: Any, column: Any, addends: Sequence[Any]) -> Any:
        return epilogue.value(total, places(flat_batch, row, column), addends)

    def addends(flat_batch: Any, row: Any, column: Any) -> list[Any]:
        return epilogue.addends(places(flat_batch, row, column))

    lay = dict(zip(("a", "b", "out"), matrices, strict=True))
    return Product(contraction, tuple(fresh[param] for param in func.params), **lay, index_out=index_out, value=value, addends=addends)


class _Axes:
    """A block's axes, and what it accesses in their terms."""

    def __init__(self, block: Any) -> None:
        self._vars = [axis.var for axis in block.iter_vars]
        self._extents = [int(axis.dom.extent) for axis in block.iter_vars]
        self._analyzer = Analyzer()
        for axis in block.iter_vars:
            self._analyzer.bind(axis.var, Range.from_min_extent(axis.dom.min, axis.dom.extent))

    def position(self, var: Any) -> int | None:
        """Return which axis a variable is; None for a constant, the index of a dimension of extent 1."""
        return next((at for at, own in enumerate(self._vars) if own.same_as(var)), None)

    def strides(self, load: Any) -> dict[int, int] | None:
        """Return by axis how far apart neighbours along it lie, in elements; None where they have no fixed distance."""
        strides = dict.fromkeys(range(len(self._vars)), 0)
        for index, pitch in zip(load.indices, _dense(load.source.shape), strict=True):
            terms = detect_linear_equation(self._analyzer.simplify(index), self._vars)
            if not terms or not all(isinstance(term, tirx.IntImm) for term in terms) or int(terms[-1].value) != 0:
                return None
            for at, term in enumerate(terms[:-1]):
                strides[at] += int(term.value) * pitch
        return strides

    def matrix(self, buffer: Any, dtype: str, strides: dict[int, int] | None, groups: Sequence[tuple[int, ...]]) -> Matrix | None:
        """Return an operand whose rows, columns and batch are groups of axes; None where rows or columns have no single stride."""
        if strides is None:
            return None
        rows, columns, batch = (self._merged(group, strides) for group in groups)
        if len(rows) > 1 or len(columns) > 1:
            return None
        unit = [(1, 1)]
        return Matrix(buffer, dtype, (rows or unit)[0], (columns or unit)[0], tuple(batch))

    def _merged(self, group: Sequence[int], strides: dict[int, int]) -> list[Dim]:
        """Return the dimensions of a group of axes, neighbours joined where one walks on where the other ends."""
        dims: list[Dim] = []
        for at in group:
            extent, stride = self._extents[at], strides.get(at, 0)
            if extent == 1:
                continue
            if dims and dims[-1][1] == extent * stride:
                dims[-1] = dims[-1][0] * extent, stride
            else:
                dims.append((extent, stride))
        return dims

    def unflat(self, group: Sequence[int], flat: Any) -> list[tuple[int, Any]]:
        """Return the value of each axis of a group at a place in the group as a whole."""
        found: list[tuple[int, Any]] = []
        inner = 1
        for number, at in enumerate(reversed(group), start=1):
            value = flat if inner == 1 else flat // inner
            found.append((at, value if number == len(group) else value % self._extents[at]))
            inner *= self._extents[at]
        return found


def _dense(shape: Sequence[Any]) -> list[int]:
    sizes = [int(extent) for extent in shape]
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def _uncast(expr: Any) -> Any:
    """Return what a widening cast widens. A narrowing one changes values; its operand is then nothing that can be loaded."""
    return expr.value if isinstance(expr, tirx.Cast) and dtype_bytes(str(expr.value.ty.dtype)) <= dtype_bytes(str(expr.ty.dtype)) else expr


def _is_load_of(expr: Any, buffer: Any) -> bool:
    return isinstance(expr, TensorLoad) and expr.source.same_as(buffer)


def _loads_of(expr: Any, but: Any) -> list[Any]:
    """Return the distinct loads in an expression but for those of one buffer."""
    found: list[Any] = []

    def visit(load: Any) -> Any:
        if not load.source.same_as(but) and not any(tvm_ffi.structural_equal(load, other) for other in found):
            found.append(load)
        return load

    tvm_ffi.structural_map(expr, [(TensorLoad, visit)], order="pre")
    return found


def _narrowed(load: Any) -> Any:
    """Return a load with indices of 32 bits, half of the registers, where these are widened ones and address all of the buffer."""
    indices = [index.value if isinstance(index, tirx.Cast) else index for index in load.indices]
    is_small = math.prod(int(extent) for extent in load.source.shape) < 2**31
    return load.source[tuple(indices)] if is_small and all(str(index.ty.dtype) == "int32" for index in indices) else load


def _replaced(expr: Any, sums: Any, total: Any, addends: dict[Any, Any], known: dict[Any, Any]) -> Any:
    """Return an expression with a given sum in place of loads of sums, and what is known in place of loads and variables."""

    def replace_load(load: Any) -> Any:
        if sums is not None and load.source.same_as(sums):
            return total
        return next((value for other, value in addends.items() if tvm_ffi.structural_equal(load, other)), load)

    return tvm_ffi.structural_map(expr, [(TensorLoad, replace_load), (Var, lambda var: known.get(var, var))], order="pre")
