"""Owns what passes that move reshapes and transposes share: reading a chain of them as one view, and writing a view as operators.

Knows nothing of what the passes move them past.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable

from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import array_of, constant, name_of
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, static_shape
from kerneldecl.compiler.graph.views import Shape, View

RESHAPES = frozenset({"relax.expand_dims", "relax.squeeze", "relax.flatten", "relax.reshape"})
VIEWS = RESHAPES | {"relax.permute_dims"}


class ViewRewriter(Rewriter):
    """Rewrites chains of reshapes and transposes as views of what is before them."""

    def view_of(self, value: relax.Expr) -> tuple[relax.Expr, View | None]:
        """Return the first value of a chain of reshapes and transposes, and the view of it; no view of an empty array."""
        return chain_of(self.known(value), self.call_of)

    def reshaped(self, x: relax.Expr, shape: Shape) -> relax.Expr:
        """Return `x` in another shape, as one view of what is before it."""
        if static_shape(x) == shape:
            return x
        source, view = self.view_of(x)
        moved = view.reshaped(shape) if view is not None else None
        return self.emitted(op.reshape(x, shape)) if moved is None else self.viewed(source, moved)

    def permuted(self, x: relax.Expr, axes: tuple[int, ...]) -> relax.Expr:
        """Return `x` with its axes in another order, as one view of what is before it."""
        source, view = self.view_of(x)
        return self.emitted(op.permute_dims(x, list(axes))) if view is None else self.viewed(source, view.permuted(axes))

    def moved(self, x: relax.Expr, view: View) -> relax.Expr:
        """Return a view of `x`, as one view of what is before it."""
        source, before = self.view_of(x)
        split = before.reshaped(view.parts or (1,)) if before is not None else None
        whole = split.permuted(view.order).reshaped(view.shape) if split is not None and view.parts else None
        return self.viewed(x, view) if whole is None else self.viewed(source, whole)

    def spread(self, x: relax.Expr, shape: Shape, wanted: Shape) -> relax.Expr:
        """Return `x`, first in another shape of as many elements, broadcast to a wanted one."""
        x = self.reshaped(x, shape)
        return x if shape == wanted else self.emitted(op.broadcast_to(x, wanted))

    def viewed(self, source: relax.Expr, view: View) -> relax.Expr:
        """Return a view of a value, by a transpose at most, with a reshape before and one behind where it needs these."""
        value = array_of(source)
        if value is not None:
            moved = value.reshape(view.parts or (1,)).transpose(view.order or None).reshape(view.shape)
            return constant(moved, dtype_of(source), name_of(source))
        if view.is_reshape:
            return self._in_shape(source, view.shape)
        before, axes = _transpose(static_shape(source) or (), view)
        return self._in_shape(self.emitted(op.permute_dims(self._in_shape(source, before), list(axes))), view.shape)

    def _in_shape(self, value: relax.Expr, shape: Shape) -> relax.Expr:
        return value if static_shape(value) == shape else self.emitted(op.reshape(value, shape))


def chain_of(value: relax.Expr, call_of: Callable[[relax.Expr], relax.Call | None]) -> tuple[relax.Expr, View | None]:
    """Return the first value of a chain of reshapes and transposes, and the view of it; `call_of` gives the operator that makes a value."""
    shape, call = static_shape(value), call_of(value)
    if call is not None and call.op.name in VIEWS and shape is not None and static_shape(call.args[0]) is not None:
        source, view = chain_of(call.args[0], call_of)
        if view is not None:
            last = view.permuted(axes_of(call)) if call.op.name == "relax.permute_dims" else view.reshaped(shape)
            if last is not None:
                return source, last
    return value, View.of(shape) if shape is not None else None


def axes_of(call: relax.Call) -> Shape:
    """Return the order of axes of a transpose."""
    rank = int(call.ty.ndim)
    return tuple(reversed(range(rank))) if call.attrs.axes is None else tuple(int(axis) % rank for axis in call.attrs.axes)


def slice_of(call: relax.Call) -> tuple[int, int, int] | None:
    """Return the axis that a slice cuts, its first element and the one after its last; None for steps and for more axes."""
    shape, after = static_shape(call.args[0]) or (), static_shape(call) or ()
    given = [[_number(each) for each in arg.fields] for arg in call.args[1:] if isinstance(arg, relax.Tuple)]
    if len(given) != len(call.args) - 1 or len(given) not in {3, 4} or any(None in part for part in given):
        return None
    if any(step != 1 for steps in given[3:] for step in steps):
        return None
    cut = [
        (int(axis) % len(shape), int(begin))  # type: ignore[arg-type]
        for axis, begin in zip(given[0], given[1], strict=True)
        if shape[int(axis)] != after[int(axis)]  # type: ignore[arg-type]
    ]
    if len(cut) > 1:
        return None
    axis, begin = cut[0] if cut else (0, 0)
    start = max(0, begin + shape[axis] if begin < 0 else begin)
    return axis, start, start + after[axis]


def _number(expr: relax.Expr) -> int | None:
    value = getattr(expr, "value", None)
    value = getattr(value, "value", value)
    return value if isinstance(value, int) else None


def _transpose(shape: Shape, view: View) -> tuple[Shape, Shape]:
    """Return the shape to be transposed and the axes: of the source as it is, of one that gives the view's shape, or of fewest axes."""
    dims = _moved_axes(shape, view)
    if dims is not None:
        return shape, _with_units(shape, dims, view.shape)
    axes = view.joined().axes
    if all(len(axis) <= 1 for axis in axes):
        by_source = sorted(range(len(axes)), key=lambda axis: axes[axis] or (-1,))
        return tuple(view.shape[axis] for axis in by_source), tuple(by_source.index(axis) for axis in range(len(axes)))
    return view.moved()


def _moved_axes(shape: Shape, view: View) -> list[int] | None:
    """Return the source's axes above 1 in the order of the view; None where it moves parts of them."""
    sizes = list(itertools.accumulate(view.parts, operator.mul))
    parts_of, begin = {}, 1
    for axis, extent in enumerate(shape):
        end = begin * extent
        parts_of[axis] = [part for part, size in enumerate(sizes) if begin < size <= end]
        if extent > 1 and (not parts_of[axis] or sizes[parts_of[axis][-1]] != end):
            return None
        begin = end
    by_order = sorted((axis for axis in parts_of if parts_of[axis]), key=lambda axis: view.order.index(parts_of[axis][0]))
    return by_order if [part for axis in by_order for part in parts_of[axis]] == list(view.order) else None


def _with_units(shape: Shape, dims: list[int], wanted: Shape) -> Shape:
    """Return an order of all axes: `dims`, with axes of extent 1 where the wanted shape has them, or at the end."""
    units, rest, axes = [axis for axis, extent in enumerate(shape) if extent == 1], list(dims), []
    for extent in wanted:
        if extent == 1 and units:
            axes.append(units.pop(0))
        elif extent > 1 and rest:
            axes.append(rest.pop(0))
    return (*axes, *rest, *units)
