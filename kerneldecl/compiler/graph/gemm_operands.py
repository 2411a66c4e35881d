"""Owns how a batch of matrices that is a view lies in memory, and which transposes no GEMM reads or writes through.

Knows nothing of rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import tvm
from tvm import relax

from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.view_rewriting import VIEWS, axes_of, chain_of
from kerneldecl.compiler.graph.views import View


@dataclass(frozen=True)
class Stored:
    """A batch of matrices in memory: the value that holds it, whether rows are last there, and the heads that are interleaved."""

    value: relax.Expr
    is_transposed: bool = False
    heads: int = 0
    """Matrices that are interleaved row by row, [batch / heads, rows, heads, columns] or with rows and columns swapped; 0 for none."""


def view_of(graph: Dataflow, value: relax.Expr) -> tuple[relax.Expr, View | None]:
    """Return the first value of a chain of reshapes and transposes, and the view of it."""
    return chain_of(value, graph.call)


def stored(graph: Dataflow, operand: relax.Expr) -> Stored:
    """Return how the matrices of an operand of two or three axes lie in memory: as they are, unless a GEMM can read what they view."""
    source, view = view_of(graph, operand)
    if view is None or len(view.axes) not in {2, 3}:  # a vector, or several axes of matrices
        return Stored(operand)
    joined = view.joined()
    batch, rows, columns = ((), *joined.axes)[-3:] if len(joined.axes) == 2 else joined.axes
    everything = tuple(range(len(joined.parts)))
    if len(rows) > 1 or len(columns) > 1:
        return Stored(operand)
    for is_transposed, (first, last) in enumerate(((rows, columns), (columns, rows))):
        if (*batch, *first, *last) == everything:
            return Stored(source, bool(is_transposed))
        if batch and (*batch[:-1], *first, batch[-1], *last) == everything:
            return Stored(source, bool(is_transposed), joined.parts[batch[-1]])
    return Stored(operand)


def operands_of(graph: Dataflow, matmul: relax.Call) -> tuple[Stored, Stored]:
    """Return how both operands lie in memory; heads of one are those of the other, if it has any."""
    a, b = (stored(graph, arg) for arg in matmul.args)
    return (a, Stored(matmul.args[1])) if a.heads and b.heads and a.heads != b.heads else (a, b)


def stored_result(graph: Dataflow, result: relax.Var) -> tuple[relax.Var, int] | None:
    """Return what alone reads a batch of matrices and is it with interleaved heads, through views, and how many; None for other readers."""
    last, reader = None, graph.only_reader(result)
    while reader is not None and graph.operator(reader) in VIEWS:
        last, reader = reader, graph.only_reader(reader)
    source, view = view_of(graph, last) if last is not None else (result, None)
    shape = static_shape(result) or ()
    if last is None or view is None or not source.same_as(result) or len(shape) != 3:
        return None
    parts, order = view.moved()
    if order not in {(0, 2, 1, 3), (1, 0, 2)} or parts[-2:] != shape[-2:] or math.prod(parts[:-2]) != shape[0]:
        return None
    return last, parts[-3]


def moved_bytes(mod: tvm.IRModule) -> int:
    """Return the bytes of the results of transposes that no GEMM can read or write through: those that need a kernel."""
    total = 0
    for func in mod.functions.values():
        if isinstance(func, relax.Function):
            graph = Dataflow.of(func)
            written = {found[0] for var in graph.values if (found := _written(graph, var)) is not None}
            moved = {var for value in _read(graph, func) for var in _transposes(graph, value, written)}
            total += sum(math.prod(static_shape(var) or (0,)) * tvm.DataType(dtype_of(var)).itemsize for var in moved)
    return total


def _read(graph: Dataflow, func: relax.Function) -> Iterator[relax.Expr]:
    """Yield the values that something but a view reads: of a GEMM's operands what it reads through views."""
    for var, value in graph.values.items():
        if graph.operator(var) == "relax.matmul":
            yield from (each.value for each in operands_of(graph, value))
        elif graph.operator(var) not in VIEWS:
            yield from relax.analysis.free_vars(value)
    yield from relax.analysis.free_vars(func.body.body)


def _written(graph: Dataflow, var: relax.Var) -> tuple[relax.Var, int] | None:
    """Return `stored_result` of what a batched matmul ends in: a cast, a scale or an activation is a part of it."""
    found = stored_result(graph, var)
    value = None if found is None else graph.call(var)  # few values are read by views alone: the way back is walked for these
    while value is not None and value.op.name != "relax.matmul" and value.op.name not in VIEWS and value.args:
        value = graph.call(value.args[0])
    is_batched = value is not None and value.op.name == "relax.matmul" and len(static_shape(value) or ()) == 3
    return found if is_batched else None


def _transposes(graph: Dataflow, value: relax.Expr, written: set[relax.Var]) -> Iterator[relax.Var]:
    """Yield the transposes that a value is a view by, back to one that a GEMM writes."""
    call = graph.call(value)
    while call is not None and value not in written and call.op.name in VIEWS:
        if call.op.name == "relax.permute_dims" and not _keeps_order(call):
            yield value
        value = call.args[0]
        call = graph.call(value)


def _keeps_order(permutation: relax.Call) -> bool:
    shape = static_shape(permutation.args[0])
    whole = None if shape is None else View.of(shape)
    return whole is not None and whole.permuted(axes_of(permutation)).is_reshape
