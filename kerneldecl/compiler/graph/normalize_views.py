"""Owns the pass that brings reshapes, transposes and matmuls into the form in which rules are recognised.

Knows nothing of rules.

Views sink: what a linear layer computes stays two-dimensional until something needs another shape, and reshapes and transposes that
undo each other vanish. Of what is left a reshape is a view for RewriteDataflowReshape, since no kernel needs to move data for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.gemm_operands import moved_bytes
from kerneldecl.compiler.graph.matmul_views import MatmulRewriter
from kerneldecl.compiler.graph.named_constants import array_of, constant, is_array, name_of, scalar_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.view_rewriting import RESHAPES, axes_of, slice_of
from kerneldecl.compiler.graph.views import Shape, View

_UNARY = ("nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.leakyrelu", "sigmoid", "tanh", "exp", "negative", "sqrt", "rsqrt", "erf")
UNARY = frozenset(f"relax.{name}" for name in (*_UNARY, "astype"))
"""Operators of one operand that work on each element by itself."""
BINARY = frozenset(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power"))
_LARGEST_MASK = 16 << 20
"""Bytes of a constant mask for all heads: above that, a kernel of its own adds the mask."""
_ROW_WISE = frozenset({"relax.nn.softmax", "relax.nn.layer_norm", "relax.nn.rms_norm"})


@tvm.transform.module_pass(opt_level=0, name="NormalizeViews")
class NormalizeViews:
    """Makes matmuls two- or three-dimensional, and moves reshapes and transposes behind what works on elements or rows.

    - a chain of reshapes and transposes, expand_dims, squeeze and flatten among them, is a transpose with a reshape before and behind
      at most, and nothing but a reshape where that is enough
    - a matmul by a matrix is one of two matrices; a matmul of more axes has one batch axis
    - operators of elements, and norms and softmax of rows, are applied before a view of what they read
    - transposes of rows move behind matmuls by a matrix, too, if that leaves fewer bytes to be moved in all
    - a slice is taken before a view where it is a slice of one axis there, too
    - a broadcast, cast or slice that changes nothing vanishes; so do multiplication by 1, addition of 0, and a choice that is known
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        kept = _KeepRows(mod).rewritten_module(mod)
        moved = moved_bytes(kept)
        sunk = _SinkRows(kept).rewritten_module(kept) if moved else kept
        return sunk if moved_bytes(sunk) < moved else kept


class _Normalizer(MatmulRewriter):
    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        args = [self.known(arg) for arg in call.args]
        if any(known is not arg for known, arg in zip(args, call.args, strict=True)):
            call = self.builder_.normalize(relax.Call(call.op, args, call.attrs, call.ty_args))
        shape = static_shape(call)
        if shape is None or any(isinstance(arg.ty, relax.TensorType) and static_shape(arg) is None for arg in call.args):
            return call
        if self._changes_nothing(call, operator):
            return call.args[0]
        rule = self._rules().get(operator)
        return call if rule is None else rule(call, shape)

    def _rules(self) -> Mapping[str, Callable[[relax.Call, Shape], relax.Expr]]:
        return {
            **dict.fromkeys(RESHAPES, lambda call, shape: self.reshaped(call.args[0], shape)),
            **dict.fromkeys(UNARY, self._unary),
            **dict.fromkeys(BINARY, self._binary),
            **dict.fromkeys(_ROW_WISE, self._row_wise),
            "relax.matmul": self.matmul,
            "relax.where": self._chosen,
            "relax.repeat": self._repeated,
            "relax.permute_dims": lambda call, _: self.permuted(call.args[0], axes_of(call)),
            "relax.take": self._take,
            "relax.strided_slice": self._slice,
        }

    def _changes_nothing(self, call: relax.Call, operator: str) -> bool:
        if operator not in {"relax.broadcast_to", "relax.astype", "relax.strided_slice"}:
            return False
        has_all = operator != "relax.strided_slice" or slice_of(call) is not None  # one from last to first has as many elements
        return has_all and static_shape(call) == static_shape(call.args[0]) and dtype_of(call) == dtype_of(call.args[0])

    def _unary(self, call: relax.Call, _: Shape) -> relax.Expr:
        source, view = self.view_of(call.args[0])
        if view is None or source.same_as(call.args[0]):
            return call
        return self.viewed(self._with_args(call, [source, *call.args[1:]]), view)

    def _with_args(self, call: relax.Call, args: list[relax.Expr]) -> relax.Expr:
        return self.emitted(relax.Call(call.op, args, call.attrs, call.ty_args))

    def _row_wise(self, call: relax.Call, shape: Shape) -> relax.Expr:
        """Apply a norm of the last axis to a matrix, and softmax of it to what is viewed, where a view keeps rows whole."""
        x, operator = call.args[0], str(call.op.name)
        axes = [call.attrs.axis] if operator == "relax.nn.softmax" else call.attrs.axes
        source, view = self.view_of(x)
        if (
            view is None
            or [int(axis) % len(shape) for axis in axes] != [len(shape) - 1]
            or not _keeps_rows(view, static_shape(source) or ())
        ):
            return call
        if operator == "relax.nn.softmax":
            return call if source.same_as(x) else self.viewed(self.emitted(op.nn.softmax(source, axis=-1)), view)
        rows = self.reshaped(source, (math.prod(shape[:-1]), shape[-1]))
        if rows.same_as(x):
            return call
        if operator == "relax.nn.rms_norm":
            return self.viewed(self.emitted(op.nn.rms_norm(rows, call.args[1], axes=[-1], epsilon=call.attrs.epsilon)), view)
        flags = {"center": call.attrs.center, "scale": call.attrs.scale}
        norm = op.nn.layer_norm(rows, *call.args[1:3], axes=[-1], epsilon=call.attrs.epsilon, **flags)
        return self.viewed(self.emitted(norm), view)

    def _binary(self, call: relax.Call, shape: Shape) -> relax.Expr:
        (a, b), operator = call.args, str(call.op.name)
        for kept, other in ((a, b), (b, a)) if operator in {"relax.add", "relax.multiply"} else ((a, b),):
            if static_shape(kept) == shape and dtype_of(kept) == dtype_of(call) and _is_neutral(other, operator):
                return kept
        viewed = [self._viewed_operand(operand, shape) for operand in (a, b)]
        ranked = sorted((each for each in (0, 1) if viewed[each] is not None), key=lambda each: len(static_shape(viewed[each][0]) or ()))  # type: ignore[index]
        for each in ranked:
            source, view = viewed[each]  # type: ignore[misc]
            other = self._operand_in((b, a)[each], shape, view, static_shape(source) or ())
            if other is None and operator == "relax.add" and view.is_reshape and self._is_product(source):
                other = self._spread((b, a)[each], shape, static_shape(source) or ())
            if other is not None:
                return self.viewed(self._with_args(call, [source, other] if each == 0 else [other, source]), view)
        return call

    def _viewed_operand(self, operand: relax.Expr, shape: Shape) -> tuple[relax.Expr, View] | None:
        """Return what an operand of the full shape is a view of, if that has no more axes."""
        source, view = self.view_of(operand)
        is_view = view is not None and not source.same_as(operand) and not is_array(source) and static_shape(operand) == shape
        return (source, view) if view is not None and is_view and len(static_shape(source) or ()) <= len(shape) else None

    def _operand_in(self, operand: relax.Expr, shape: Shape, view: View, inner: Shape) -> relax.Expr | None:
        """Return the other operand as it is combined with the tensor that is viewed; None where it would have to be moved for that."""
        given = static_shape(operand) or ()
        if math.prod(given) == 1:
            return self.reshaped(operand, ()) if len(given) > len(inner) else operand
        if given == shape:
            source, own = self.view_of(operand)
            undone = own.undone(view, inner) if own is not None else None
            is_free = undone is not None and (undone.is_reshape or is_array(source))
            return self.viewed(source, undone) if undone is not None and is_free else None
        if given[-1] == math.prod(given) == shape[-1] and _keeps_rows(view, inner):
            return self.reshaped(operand, given[-1:])
        return None

    def _is_product(self, value: relax.Expr) -> bool:
        """Say whether a value is a matmul's, scaled and rounded or not."""
        call = self.call_of(value)
        while call is not None and call.op.name in {"relax.multiply", "relax.divide", "relax.astype"}:
            if call.op.name != "relax.astype" and scalar_of(self.known(call.args[1])) is None:
                return False
            call = self.call_of(call.args[0])
        return call is not None and call.op.name == "relax.matmul"

    def _spread(self, operand: relax.Expr, shape: Shape, inner: Shape) -> relax.Expr | None:
        """Return a mask in the full shape, which an epilogue can add: it is made once, and layers share it."""
        given = static_shape(operand) or ()
        size = math.prod(shape) * tvm.DataType(dtype_of(operand)).itemsize
        if len(given) > len(shape) or not all(have in {1, want} for have, want in zip(given[::-1], shape[::-1], strict=False)):
            return None
        value = array_of(operand)
        if value is None:
            return self.reshaped(self.emitted(op.broadcast_to(operand, shape)), inner)
        spread = np.broadcast_to(value, shape).reshape(inner) if size <= _LARGEST_MASK else None
        return None if spread is None else constant(spread, dtype_of(operand), name_of(operand))

    def _repeated(self, call: relax.Call, shape: Shape) -> relax.Expr:
        """Return matrices that are each repeated, as those of grouped queries are, as a view of broadcast ones."""
        given, count = static_shape(call.args[0]) or (), int(call.attrs.repeats)
        if len(shape) < 3 or call.attrs.axis is None or int(call.attrs.axis) % len(shape) != len(shape) - 3:
            return call
        *outer, heads, rows, columns = given
        grouped = self.reshaped(call.args[0], (*outer, heads, 1, rows, columns))
        return self.reshaped(self.emitted(op.broadcast_to(grouped, (*outer, heads, count, rows, columns))), shape)

    def _chosen(self, call: relax.Call, shape: Shape) -> relax.Expr:
        """Return what a condition that is the same everywhere chooses, if that has the shape of the result."""
        condition = array_of(call.args[0])
        if condition is None or not condition.size or condition.any() != condition.all():
            return call
        chosen = call.args[1 if condition.all() else 2]
        return chosen if static_shape(chosen) == shape and dtype_of(chosen) == dtype_of(call) else call

    def _take(self, call: relax.Call, shape: Shape) -> relax.Expr:
        """Make a slice of an index that is known."""
        index, x = array_of(call.args[1]), call.args[0]
        if index is None or index.ndim or call.attrs.axis is None:
            return call
        axis, at = int(call.attrs.axis) % len(static_shape(x) or ()), int(index)
        extent = (static_shape(x) or ())[axis]
        at = at + extent if at < 0 else at
        return self.reshaped(self._sliced(x, axis, at, at + 1), shape) if 0 <= at < extent else call

    def _slice(self, call: relax.Call, shape: Shape) -> relax.Expr:
        found = slice_of(call)
        return call if found is None or 0 in shape else self._sliced(call.args[0], *found)

    def _sliced(self, x: relax.Expr, axis: int, start: int, stop: int) -> relax.Expr:
        """Return a slice of one axis; of what is viewed, where it is a slice of one axis there, too."""
        source, view = self.view_of(x)
        shape, joined = static_shape(source) or (), view.joined() if view is not None else None
        cut = joined.sliced(axis, start, stop) if joined is not None and not source.same_as(x) else None
        if joined is None or cut is None:
            return self.emitted(op.strided_slice(x, [axis], [start], [stop]))
        inner = math.prod(joined.parts[cut.part + 1 :])
        for dim, extent in enumerate(shape):
            stride = math.prod(shape[dim + 1 :])
            if extent > 1 and inner * joined.parts[cut.part] == stride * extent and inner % stride == 0:
                step = inner // stride
                return self.viewed(self.emitted(op.strided_slice(source, [dim], [cut.start * step], [cut.stop * step])), cut.view)
        return self.emitted(op.strided_slice(x, [axis], [start], [stop]))


@relax.expr_functor.mutator
class _KeepRows(_Normalizer):
    pass


@relax.expr_functor.mutator
class _SinkRows(_Normalizer):
    sinks_rows = True


def _keeps_rows(view: View, shape: Shape) -> bool:
    """Say whether rows of a view, along its last axis, are rows of its source, which has this shape."""
    *_, last = view.joined().axes or ((),)
    return bool(shape) and view.shape[-1:] == shape[-1:] and (shape[-1] == 1 or last == (len(view.joined().parts) - 1,))


def _is_neutral(operand: relax.Expr, operator: str) -> bool:
    """Say whether an operand changes nothing: a constant 1 that is multiplied by, or one of zeros that is added."""
    if operator in {"relax.multiply", "relax.divide", "relax.power"}:
        return scalar_of(operand) == 1
    value = array_of(operand) if operator in {"relax.add", "relax.subtract"} else None
    return value is not None and not value.any()
