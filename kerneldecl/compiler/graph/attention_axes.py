"""Owns what the axes of attention's matrices stand for in a model, and how many bytes the rule's layouts move.

Knows nothing of masks but their shapes, nor of the rule's other attributes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from tvm import DataType, relax

from kerneldecl.compiler.graph.attention import Mask, RefusedError, Written
from kerneldecl.compiler.graph.dataflow import Dataflow
from kerneldecl.compiler.graph.gemm_operands import view_of
from kerneldecl.compiler.graph.named_constants import is_array, scalar_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rotary import rotary_of
from kerneldecl.compiler.graph.rule_use import Made
from kerneldecl.compiler.graph.view_rewriting import RESHAPES, VIEWS
from kerneldecl.compiler.graph.views import Shape, View

Layout = Literal["bshd", "bhsd"]
LAYOUTS: tuple[Layout, ...] = ("bshd", "bhsd")


@dataclass(frozen=True)
class Axes:
    """What the axes of three matrices stand for."""

    batch: int
    kv_heads: int
    group: int
    """Heads of queries that share one of keys."""
    queries: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def placed(self, view: View, rows: int, layout: Layout, group: int = 1) -> View | None:
        """Return the view of [batch, rows, columns] in a layout of four axes; None where its axes are others."""
        columns = view.shape[-1]
        whole = view.reshaped((self.batch, self.kv_heads, group, rows, columns))
        if whole is None:
            return None
        if layout == "bhsd":
            return whole.reshaped((self.batch, self.kv_heads * group, rows, columns))
        return whole.permuted((0, 3, 1, 2, 4)).reshaped((self.batch, rows, self.kv_heads * group, columns))


@dataclass(frozen=True)
class Matrices:
    """A matrix of each head, [batch, rows, columns], as a view of a value."""

    source: relax.Expr
    view: View
    dtype: str

    def moved_bytes(self, graph: Dataflow, placed: View) -> int:
        """Return the bytes that a transpose moves; rotary embedding writes what it computes in either layout."""
        is_free = placed.is_reshape or is_array(self.source) or rotary_of(graph, self.source) is not None
        return 0 if is_free else math.prod(placed.shape) * DataType(self.dtype).itemsize

    def made(self, placed: View) -> Made:
        return Made(self.source, placed.shape, self.dtype, lambda rewriter, value: rewriter.moved(value, placed))


@dataclass(frozen=True)
class Choice:
    """A way to call the rule."""

    axes: Axes
    layout: Layout
    cost: int
    """Bytes that transposes move."""
    operands: tuple[Made, ...]
    last: relax.Var
    """What the result is bound to."""
    written: View | None
    """The view of the result that this is; None for one that only has another shape."""
    is_seen: bool
    """Whether something in the model has these axes."""


def operands_of(graph: Dataflow, written: Written) -> tuple[list[Matrices], float]:
    """Return queries, keys and values as matrices of rows, and a number that they are multiplied by; raise RefusedError for empty ones."""
    found, scale = [], 1.0
    for value, order in ((written.q, (0, 1, 2)), (written.k, (0, 2, 1)), (written.v, (0, 1, 2))):
        source, view = view_of(graph, value)
        source, factor = _unscaled(graph, source) if value is not written.v else (source, 1.0)
        scale *= factor
        whole = view.reshaped((1,) * (3 - len(view.axes)) + view.shape) if view is not None and len(view.axes) <= 3 else None
        if whole is None:
            raise RefusedError("its products have more than one batch axis, or nothing to multiply")
        found.append(Matrices(source, whole.permuted(order), dtype_of(value)))
    return found, scale


def _unscaled(graph: Dataflow, value: relax.Expr) -> tuple[relax.Expr, float]:
    """Return a value before it was multiplied or divided by a number, and the factor."""
    call = graph.call(value)
    number = scalar_of(call.args[1]) if call is not None and call.op.name in {"relax.multiply", "relax.divide"} else None
    if call is None or not number or static_shape(call.args[0]) != static_shape(value):
        return value, 1.0
    return call.args[0], number if call.op.name == "relax.multiply" else 1 / number


def choices_of(graph: Dataflow, written: Written, operands: tuple[Matrices, ...], core: relax.Var) -> Iterator[Choice]:
    """Yield the ways to take the axes of three matrices apart."""
    q, k, v = operands
    views = list(_views_behind(graph, core))
    shapes = [*written.shapes, *(static_shape(each) or () for each in (core, *views)), *(operand.view.parts for operand in operands)]
    shapes += [shape for mask in written.masks for shape in _mask_shapes(graph, mask)]
    shapes += [static_shape(operand.source) or () for operand in operands]
    starts = {shape[:3] for shape in shapes if len(shape) == 4}
    extents = {1, *itertools.chain.from_iterable(shapes)}
    matrices, rows, keys = k.view.shape[0], q.view.shape[1], k.view.shape[1]
    if (q.view.shape[0], v.view.shape[0]) != (matrices, matrices):
        raise RefusedError("queries, keys and values do not have as many heads in its products")
    for batch, queries in itertools.product(sorted(extents), sorted(extents)):
        if 0 in (batch, queries) or matrices % batch or rows % queries:
            continue
        axes = Axes(batch, matrices // batch, rows // queries, queries)
        for layout in LAYOUTS:
            placed = (axes.placed(q.view, queries, layout, axes.group), *(axes.placed(each.view, keys, layout) for each in (k, v)))
            if any(each is None for each in placed):
                continue
            last, result, moved = _result(graph, axes, layout, core, views)
            pairs = [(operand, view) for operand, view in zip(operands, placed, strict=True) if view is not None]
            cost = moved + sum(operand.moved_bytes(graph, view) for operand, view in pairs)
            is_seen = not starts.isdisjoint({(batch, axes.heads, queries), (batch, queries, axes.heads)})
            yield Choice(axes, layout, cost, tuple(operand.made(view) for operand, view in pairs), last, result, is_seen)


def _views_behind(graph: Dataflow, core: relax.Var) -> Iterator[relax.Var]:
    """Yield the views of the result, each of which alone reads the one before."""
    reader = graph.only_reader(core)
    while reader is not None and graph.operator(reader) in VIEWS:
        yield reader
        reader = graph.only_reader(reader)


def _result(graph: Dataflow, axes: Axes, layout: Layout, core: relax.Var, views: list[relax.Var]) -> tuple[relax.Var, View | None, int]:
    """Return which variable the result is, the view that makes it so, and the bytes that are moved to what is read."""
    shape = static_shape(core) or ()
    bytes_ = math.prod(shape) * DataType(dtype_of(core)).itemsize
    whole = View.of((axes.batch, axes.kv_heads, axes.group, axes.queries, shape[-1]))
    assert whole is not None, "empty products are refused before"
    wanted = whole if layout == "bhsd" else whole.permuted((0, 3, 1, 2, 4))
    for last in (*reversed(views), core):
        _, view = view_of(graph, last)
        seen = View.of(shape) if last.same_as(core) else view
        if seen is not None and seen.moved() == wanted.moved():
            later = views[views.index(last) + 1 :] if not last.same_as(core) else views
            return last, None, 0 if all(graph.operator(each) in RESHAPES for each in later) else bytes_
    by_rows = View.of((axes.batch, axes.queries, axes.kv_heads, axes.group, shape[-1]))
    assert by_rows is not None, "as above"
    return core, by_rows.permuted((0, 2, 3, 1, 4)).reshaped(shape), bytes_


def _mask_shapes(graph: Dataflow, mask: Mask) -> list[Shape]:
    """Return shapes that tell batch and heads apart."""
    value, shapes = mask.value, [mask.shape]
    call = graph.call(value)
    while call is not None and call.op.name in {*RESHAPES, "relax.broadcast_to"}:
        shapes.append(static_shape(call) or ())
        call = graph.call(call.args[0])
    return shapes
