"""Owns the reading of a GEMM for kernels that address memory themselves: where its matrices lie, what its epilogue computes.

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
from kerneldecl.templates.shared.contraction import FusedReduction, fuse_epilogue
from kerneldecl.templates.shared.fast_math import with_fast_activations

Dim = tuple[int, int]
"""Extent and stride in elements."""


@dataclass(frozen=True)
class Matrix:
    """A batch of matrices in memory. An operand's rows are what m or n indexes, its columns what k does."""

    buffer: Any
    dtype: str
    """Data type as which it is read: the buffer's own, or tfloat32 for an operand in float32."""
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
class GemmProblem:
    """C[batch, m, n] = epilogue(sum over k of A[batch, m, k] * B[batch, n, k]), on buffers of its own."""

    contraction: Contraction
    func_params: tuple[Any, ...]
    a: Matrix
    b: Matrix
    out: Matrix
    index_out: Callable[[Any, Any, Any], list[Any]]
    """(batch, m, n) -> indices of C's buffer."""
    value: Callable[[Any, Any, Any, Any, Sequence[Any]], Any]
    """(accumulator, batch, m, n, values of the epilogue's operands there) -> the element to store there."""
    aux: Callable[[Any, Any, Any], list[Any]]
    """(batch, m, n) -> loads of the epilogue's operands, such as a bias."""

    @property
    def extents(self) -> tuple[int, int, int, int]:
        return self.contraction.extents


@dataclass(frozen=True)
class EpilogueExpr:
    """The epilogue as an expression on loads of the accumulators and of other buffers, its auxiliary operands."""

    expr: Any
    """None where accumulators are stored as they are."""
    accum: Any
    """The buffer of accumulators in the expression."""
    loads: tuple[Any, ...]
    fresh: dict[Any, Any]

    @classmethod
    def of(cls, expr: Any, accum: Any, fresh: dict[Any, Any]) -> EpilogueExpr:
        """Return the epilogue that an expression is, `fresh` being the buffers that stand for a function's."""
        return cls(expr, accum, () if expr is None else tuple(loads_of(expr, accum)), fresh)

    def value(self, total: Any, places: dict[Any, Any], aux: Sequence[Any]) -> Any:
        """Return the element to store, given the accumulator, where it is and the values of the auxiliary operands there."""
        if self.expr is None:
            return total
        return replaced(self.expr, (self.accum, total), dict(zip(self.loads, aux, strict=True)), self._known(places))

    def aux(self, places: dict[Any, Any]) -> list[Any]:
        """Return the loads of the auxiliary operands at one place."""
        return [_narrowed(replaced(load, None, {}, self._known(places))) for load in self.loads]

    def _known(self, places: dict[Any, Any]) -> dict[Any, Any]:
        return {**self.fresh, **{var: tirx.Cast(var.ty.dtype, tirx.const(0, "int32") + place) for var, place in places.items()}}


def read_gemm(mod: tvm.IRModule) -> GemmProblem | None:
    """Return the GEMM that a module's function is, None where it is none or where its memory has no strides."""
    sch = Schedule(mod)
    fused = fuse_epilogue(sch)
    if fused is None:
        return None
    while producers := sch.get_producers(fused.block):
        try:
            sch.compute_inline(producers[0])
        except ScheduleError:
            return None
    with contextlib.suppress(ValueError):
        contraction = contraction_of(iter_space(sch.mod))
        if isinstance(contraction, Contraction) and contraction.is_plain:
            return _read(sch, fused, contraction)
    return None


def _read(sch: Schedule, fused: FusedReduction, contraction: Contraction) -> GemmProblem | None:
    block, last = fused.blocks(sch)
    func = sch.mod["main"]
    fresh = {param: tirx.decl_buffer([int(extent) for extent in param.shape], param.dtype, param.name) for param in func.params}
    axes = _Axes(block)
    stored = last.body if last is not None else block.body
    loads = _operand_loads(block)
    if any(load.source not in fresh for load in loads) or stored.buffer not in fresh:
        return None
    # The epilogue reads accumulators at its own axes, in some order: each of them is an axis of the GEMM.
    origin = dict(zip(stored.indices, block.body.indices, strict=True)) if last is not None else {}
    order = {var: axes.position(origin.get(var, var)) for var in stored.indices}
    m, n, k, batch = contraction.m, contraction.n, contraction.k, contraction.batch
    a, b = (loads[operand.position] for operand in (contraction.a, contraction.b))
    out = {at: stride for stride, at in zip(dense_strides(stored.buffer.shape), order.values(), strict=True) if at is not None}
    matrices = {
        "a": axes.matrix(fresh[a.source], contraction.a.dtype, axes.strides(a), (m, k, batch)),
        "b": axes.matrix(fresh[b.source], contraction.b.dtype, axes.strides(b), (n, k, batch)),
        "out": axes.matrix(fresh[stored.buffer], str(stored.buffer.dtype), out, (m, n, batch)),
    }
    found: dict[str, Any] = {name: matrix for name, matrix in matrices.items() if matrix is not None}
    if len(found) < len(matrices):
        return None
    epilogue = EpilogueExpr.of(
        None if last is None else with_fast_activations(stored.value, str(stored.buffer.dtype)), block.body.buffer, fresh
    )
    accessors = _accessors(axes, contraction, order, epilogue)
    return GemmProblem(contraction=contraction, func_params=tuple(fresh[param] for param in func.params), **found, **accessors)


def _operand_loads(block: Any) -> list[Any]:
    """Return the loads of both operands, in the order of the block's multiplication."""
    total = block.body.value
    multiply = uncast(total.b if is_load_of(total.a, block.body.buffer) else total.a)
    truncated = [tfloat32.read_by(operand) for operand in (multiply.a, multiply.b)]
    return [uncast(operand) if load is None else load for operand, load in zip((multiply.a, multiply.b), truncated, strict=True)]


def _accessors(axes: _Axes, contraction: Contraction, order: dict[Any, int | None], epilogue: EpilogueExpr) -> dict[str, Any]:
    """Return a GEMM's functions of batch, m and n; `order` is the axis of the block that each index of C is."""
    m, n, batch = contraction.m, contraction.n, contraction.batch

    def values(flat_batch: Any, row: Any, column: Any) -> dict[int, Any]:
        return {at: value for group, flat in ((batch, flat_batch), (m, row), (n, column)) for at, value in axes.unflat(group, flat)}

    def index_out(flat_batch: Any, row: Any, column: Any) -> list[Any]:
        found = values(flat_batch, row, column)
        return [found[at] if at is not None else 0 for at in order.values()]

    def places(flat_batch: Any, row: Any, column: Any) -> dict[Any, Any]:
        found = values(flat_batch, row, column)
        return {var: found[at] for var, at in order.items() if at is not None}

    def value(total: Any, flat_batch: Any, row: Any, column: Any, aux: Sequence[Any]) -> Any:
        return epilogue.value(total, places(flat_batch, row, column), aux)

    def aux(flat_batch: Any, row: Any, column: Any) -> list[Any]:
        return epilogue.aux(places(flat_batch, row, column))

    return {"index_out": index_out, "value": value, "aux": aux}


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
        """Return the stride of each axis in elements; None where one has no fixed stride."""
        strides = dict.fromkeys(range(len(self._vars)), 0)
        for index, pitch in zip(load.indices, dense_strides(load.source.shape), strict=True):
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
        return Matrix(buffer=buffer, dtype=dtype, rows=(rows or unit)[0], columns=(columns or unit)[0], batch=tuple(batch))

    def _merged(self, group: Sequence[int], strides: dict[int, int]) -> list[Dim]:
        """Return the dimensions of a group of axes, neighbours joined where the outer one continues where the inner one ends."""
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


def dense_strides(shape: Sequence[Any]) -> list[int]:
    """Return the strides of a dense buffer, in elements."""
    sizes = [int(extent) for extent in shape]
    return [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]


def uncast(expr: Any) -> Any:
    """Return what a widening cast widens. A narrowing one changes values; its operand is then nothing that can be loaded."""
    return expr.value if isinstance(expr, tirx.Cast) and dtype_bytes(str(expr.value.ty.dtype)) <= dtype_bytes(str(expr.ty.dtype)) else expr


def is_load_of(expr: Any, buffer: Any) -> bool:
    return isinstance(expr, TensorLoad) and expr.source.same_as(buffer)


def loads_of(expr: Any, but: Any) -> list[Any]:
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


def replaced(expr: Any, accum: tuple[Any, Any] | None, aux: dict[Any, Any], known: dict[Any, Any]) -> Any:
    """Return an expression with values in place of loads and variables: `accum` is the buffer of accumulators and what its loads become."""

    def replace_load(load: Any) -> Any:
        if accum is not None and load.source.same_as(accum[0]):
            return accum[1]
        return next((value for other, value in aux.items() if tvm_ffi.structural_equal(load, other)), load)

    return tvm_ffi.structural_map(expr, [(TensorLoad, replace_load), (Var, lambda var: known.get(var, var))], order="pre")
