"""Owns the pass that brings reshapes, transposes and matmuls into the form in which rules are recognised.

Knows nothing of rules.

Reshapes sink: what a linear layer computes stays two-dimensional until something needs another shape, and reshapes that undo each
other vanish. What is left of them is a view for RewriteDataflowReshape, since no kernel needs to move data for it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import array_of, constant, name_of, scalar_of
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, static_shape

Shape = tuple[int, ...]
_RESHAPES = frozenset({"relax.expand_dims", "relax.squeeze", "relax.flatten", "relax.reshape"})
_UNARY = ("nn.relu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.leakyrelu", "sigmoid", "tanh", "exp", "negative", "sqrt", "rsqrt", "erf")
UNARY = frozenset(f"relax.{name}" for name in (*_UNARY, "astype"))
"""Operators of one operand that work on each element by itself."""
BINARY = frozenset(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "power"))
_LARGEST_MASK = 16 << 20
"""Bytes of a constant mask for all heads: above that, a kernel of its own adds the mask."""
_ROW_WISE = frozenset({"relax.nn.softmax", "relax.nn.layer_norm", "relax.nn.rms_norm"})


@tvm.transform.module_pass(opt_level=0, name="NormalizeViews")
class NormalizeViews:
    """Makes matmuls two- or three-dimensional and moves reshapes behind what works on elements or rows; views that do nothing vanish.

    - expand_dims, squeeze and flatten become reshape; a transpose that moves only extents of 1 too
    - a reshape of a reshape is one, a transpose of a transpose is one
    - a matmul by a matrix is one of two matrices, with a reshape before and behind; a matmul of more axes has one batch axis
    - a broadcast, cast or slice that changes nothing vanishes; so do multiplication by 1 and addition of 0
    - operators of elements, and norms and softmax of rows, are applied before a reshape
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        return _NormalizeViews(mod).rewritten_module(mod)


@relax.expr_functor.mutator
class _NormalizeViews(Rewriter):
    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:  # noqa: PLR0911  # one for each kind of operator
        args = [self._known(arg) for arg in call.args]
        if any(known is not arg for known, arg in zip(args, call.args, strict=True)):
            call = self.builder_.normalize(relax.Call(call.op, args, call.attrs, call.ty_args))
        shape = static_shape(call)
        if shape is None or any(isinstance(arg.ty, relax.TensorType) and static_shape(arg) is None for arg in call.args):
            return call
        if operator in _RESHAPES:
            return self.reshaped(call.args[0], shape)
        if operator in UNARY and not self._is_same(call, operator):
            return self._sunk(call)
        if operator in BINARY:
            return self._binary(call, operator, shape)
        if operator in _ROW_WISE:
            return self._row_wise(call, operator)
        rule = {"relax.matmul": self._matmul, "relax.permute_dims": self._permute, "relax.take": self._take}.get(operator)
        if rule is None:
            return call.args[0] if self._is_same(call, operator) else call
        return rule(call, shape)

    def reshaped(self, x: relax.Expr, shape: Shape) -> relax.Expr:
        """Return `x` in another shape, by at most one reshape; a transpose of the last two axes moves behind it."""
        if static_shape(x) == shape:
            return x
        value = array_of(x)
        if value is not None:
            return constant(value.reshape(shape), dtype_of(x), name_of(x))
        inner = self.producer(x, "relax.reshape")
        if inner is not None:
            return self.reshaped(inner.args[0], shape)
        swap = self._swap(x)
        if swap is not None and _keeps_matrices(static_shape(x), shape):
            rows, columns = shape[-2:]
            before = self.reshaped(swap.args[0], (*shape[:-2], columns, rows))
            return self._emitted(op.permute_dims(before, list(_last_two_swapped(len(shape)))))
        return self._emitted(op.reshape(x, shape))

    def permuted(self, x: relax.Expr, axes: tuple[int, ...]) -> relax.Expr:
        """Return `x` with its axes in another order, by at most one transpose; by a reshape where that is enough."""
        shape = static_shape(x) or ()
        if axes == tuple(range(len(axes))):
            return x
        value = array_of(x)
        if value is not None:
            return constant(value.transpose(axes), dtype_of(x), name_of(x))
        inner = self.producer(x, "relax.permute_dims")
        if inner is not None:
            composed = tuple(axes_of(inner)[axis] for axis in axes)
            if axes != _last_two_swapped(len(axes)) or composed == tuple(range(len(axes))):  # a matmul takes a swap as its operand's layout
                return self.permuted(inner.args[0], composed)
        moved = [axis for axis in axes if shape[axis] > 1]
        if moved == sorted(moved):
            return self.reshaped(x, tuple(shape[axis] for axis in axes))
        return self._emitted(op.permute_dims(x, list(axes)))

    def producer(self, value: relax.Expr, operator: str) -> relax.Call | None:
        return super().producer(self._known(value), operator)

    def _known(self, value: relax.Expr) -> relax.Expr:
        """Return the constant or the first variable that a variable stands for."""
        while isinstance(value, relax.Var) and isinstance(bound := self.lookup_binding(value), (relax.Var, tvm.ir.GenericConst)):
            value = bound
        return value

    def _emitted(self, expr: relax.Expr) -> relax.Expr:
        return self.builder_.emit(expr)

    def _is_same(self, call: relax.Call, operator: str) -> bool:
        """Say whether an operator gives its argument as it is."""
        if operator not in {"relax.broadcast_to", "relax.astype", "relax.strided_slice"}:
            return False
        return static_shape(call) == static_shape(call.args[0]) and dtype_of(call) == dtype_of(call.args[0])

    def _sunk(self, call: relax.Call) -> relax.Expr:
        """Apply an operator of elements before the reshape or the swap that gives its argument."""
        swap = self._swap(call.args[0])
        if swap is not None:
            moved = self._sunk(self._with_args(call, [swap.args[0], *call.args[1:]], emitted=False))
            return self.permuted(moved if isinstance(moved, relax.Var) else self._emitted(moved), axes_of(swap))
        inner = self.producer(call.args[0], "relax.reshape")
        if inner is None:
            return call
        return self.reshaped(self._with_args(call, [inner.args[0], *call.args[1:]]), static_shape(call) or ())

    def _swap(self, value: relax.Expr) -> relax.Call | None:
        """Return the transpose of the last two axes that gives a value."""
        swap = self.producer(value, "relax.permute_dims")
        return swap if swap is not None and axes_of(swap) == _last_two_swapped(len(axes_of(swap))) else None

    def _with_args(self, call: relax.Call, args: list[relax.Expr], *, emitted: bool = True) -> relax.Expr:
        fresh = relax.Call(call.op, args, call.attrs, call.ty_args)
        return self._emitted(fresh) if emitted else self.builder_.normalize(fresh)

    def _row_wise(self, call: relax.Call, operator: str) -> relax.Expr:
        """Apply a norm of the last axis to a matrix, and softmax of it before a reshape that keeps it."""
        x, shape = call.args[0], static_shape(call) or ()
        axes = [call.attrs.axis] if operator == "relax.nn.softmax" else call.attrs.axes
        if [int(axis) % len(shape) for axis in axes] != [len(shape) - 1]:
            return call
        if operator == "relax.nn.softmax":
            inner = self.producer(x, "relax.reshape")
            keeps_rows = inner is not None and (static_shape(inner.args[0]) or (0,))[-1] == shape[-1]
            return self.reshaped(self._emitted(op.nn.softmax(inner.args[0], axis=-1)), shape) if inner is not None and keeps_rows else call
        rows = self.reshaped(x, (math.prod(shape[:-1]), shape[-1]))
        if rows is x:
            return call
        if operator == "relax.nn.rms_norm":
            moved = op.nn.rms_norm(rows, call.args[1], axes=[-1], epsilon=call.attrs.epsilon)
        else:
            flags = {"center": call.attrs.center, "scale": call.attrs.scale}
            moved = op.nn.layer_norm(rows, *call.args[1:3], axes=[-1], epsilon=call.attrs.epsilon, **flags)
        return self.reshaped(self._emitted(moved), shape)

    def _binary(self, call: relax.Call, operator: str, shape: Shape) -> relax.Expr:
        a, b = call.args
        for kept, other in ((a, b), (b, a)) if operator in {"relax.add", "relax.multiply"} else ((a, b),):
            if static_shape(kept) == shape and dtype_of(kept) == dtype_of(call) and _is_neutral(other, operator):
                return kept
        if scalar_of(b) is not None and self._swap(a) is not None and static_shape(a) == shape:
            return self._sunk(call)
        sources = [self._source(operand, shape) for operand in (a, b)]
        ranked = sorted((i for i in (0, 1) if sources[i] is not None), key=lambda i: len(static_shape(sources[i]) or ()))
        for i in ranked:
            inner = static_shape(sources[i]) or ()
            other = self._operand_in((b, a)[i], shape, inner)
            if other is None and operator == "relax.add" and self._is_product(sources[i]):
                other = self._spread((b, a)[i], shape, inner)
            if other is not None:
                operands = [sources[i], other] if i == 0 else [other, sources[i]]
                return self.reshaped(self._with_args(call, operands), shape)
        return call

    def _source(self, operand: relax.Expr, shape: Shape) -> relax.Expr | None:
        """Return what an operand of the full shape is a reshape of, if that has no more axes."""
        inner = self.producer(operand, "relax.reshape")
        is_view = inner is not None and static_shape(operand) == shape and len(static_shape(inner.args[0]) or ()) <= len(shape)
        return inner.args[0] if inner is not None and is_view else None

    def _operand_in(self, operand: relax.Expr, shape: Shape, inner: Shape) -> relax.Expr | None:
        """Return the other operand as it is combined with a tensor of the shape before the reshape; None where it cannot be."""
        given = static_shape(operand) or ()
        if math.prod(given) == 1:
            return self.reshaped(operand, ()) if len(given) > len(inner) else operand
        if given == shape:
            return self.reshaped(operand, inner)
        if given[-1] == math.prod(given) == shape[-1] == inner[-1]:
            return self.reshaped(operand, given[-1:])
        return None

    def _is_product(self, value: relax.Expr | None) -> bool:
        """Say whether a value is a matmul's, scaled or not."""
        for operator in ("relax.multiply", "relax.divide"):
            scaled = self.producer(value, operator)
            if scaled is not None and scalar_of(scaled.args[1]) is not None:
                value = scaled.args[0]
        return self.producer(value, "relax.matmul") is not None

    def _spread(self, operand: relax.Expr, shape: Shape, inner: Shape) -> relax.Expr | None:
        """Return a mask in the full shape, which an epilogue can add: it is made once, and layers share it."""
        given = static_shape(operand) or ()
        size = math.prod(shape) * tvm.DataType(dtype_of(operand)).itemsize
        if len(given) > len(shape) or not all(have in {1, want} for have, want in zip(given[::-1], shape[::-1], strict=False)):
            return None
        value = array_of(operand)
        if value is None:
            return self.reshaped(self._emitted(op.broadcast_to(operand, shape)), inner)
        return (
            constant(np.broadcast_to(value, shape).reshape(inner), dtype_of(operand), name_of(operand)) if size <= _LARGEST_MASK else None
        )

    def _matmul(self, call: relax.Call, shape: Shape) -> relax.Expr:
        a, b = call.args
        of_a, of_b = static_shape(a) or (), static_shape(b) or ()
        spread = self.producer(b, "relax.broadcast_to")
        if spread is not None and len(static_shape(spread.args[0]) or ()) == 2:
            b, of_b = spread.args[0], static_shape(spread.args[0]) or ()
        if len(of_b) == 2 and len(of_a) > 2:
            flat = self.reshaped(a, (math.prod(of_a[:-1]), of_a[-1]))
            return self.reshaped(self._emitted(op.matmul(flat, b, out_dtype=call.attrs.out_dtype)), shape)
        if len(of_a) == len(of_b) > 3 and of_a[:-2] == of_b[:-2]:
            batch = math.prod(of_a[:-2])
            a, b = (self.reshaped(each, (batch, *given[-2:])) for each, given in ((a, of_a), (b, of_b)))
        if len(static_shape(a) or ()) == len(static_shape(b) or ()) == 3:
            a, b, scale = self._unscaled(a, b)
            product = self._emitted(op.matmul(*self._ungrouped(a, b), out_dtype=call.attrs.out_dtype))
            if scale != 1.0:
                product = self._emitted(op.multiply(product, relax.const(scale, dtype_of(call))))
            return self.reshaped(product, shape)
        return call

    def _unscaled(self, *operands: relax.Expr) -> tuple[relax.Expr, relax.Expr, float]:
        """Return both operands without the numbers that they are multiplied by, and these numbers' product."""
        bare, scale = [], 1.0
        for operand in operands:
            swap = self._swap(operand)
            inner = operand if swap is None else swap.args[0]
            scaled = self.producer(inner, "relax.multiply")
            factor = scalar_of(scaled.args[1]) if scaled is not None else None
            if scaled is None or factor is None:
                bare.append(operand)
                continue
            scale *= factor
            bare.append(scaled.args[0] if swap is None else self.permuted(scaled.args[0], axes_of(swap)))
        return bare[0], bare[1], scale

    def _ungrouped(self, a: relax.Expr, b: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        """Return operands whose B is not repeated: rows of A that share a matrix of B, as in grouped-query attention, are one A."""
        swap = self._swap(b)
        view = self.producer(b if swap is None else swap.args[0], "relax.reshape")
        repeat = self.producer(view.args[0], "relax.broadcast_to") if view is not None else None
        if view is None or repeat is None:
            return a, b
        before, after = static_shape(repeat.args[0]) or (), static_shape(repeat) or ()
        if (
            len(before) != len(after)
            or before[-3] != 1
            or before != (*after[:-3], 1, *after[-2:])
            or after[-2:] != (static_shape(view) or ())[-2:]
        ):
            return a, b
        batch, (_, m, k) = math.prod(after[:-3]), static_shape(a) or ()
        shared = self.reshaped(repeat.args[0], (batch, *after[-2:]))
        return self.reshaped(a, (batch, after[-3] * m, k)), shared if swap is None else self.permuted(shared, (0, 2, 1))

    def _permute(self, call: relax.Call, _: Shape) -> relax.Expr:
        return self.permuted(call.args[0], axes_of(call))

    def _take(self, call: relax.Call, shape: Shape) -> relax.Expr:
        """Make a slice of an index that is known."""
        index, x = array_of(call.args[1]), call.args[0]
        if index is None or index.ndim or call.attrs.axis is None:
            return call
        axis, at = int(call.attrs.axis), int(index)
        extent = (static_shape(x) or ())[axis]
        at = at + extent if at < 0 else at
        return self.reshaped(self._emitted(op.strided_slice(x, [axis], [at], [at + 1])), shape) if 0 <= at < extent else call


def axes_of(call: relax.Call) -> tuple[int, ...]:
    """Return the order of axes of a transpose."""
    rank = len(static_shape(call) or ())
    return tuple(reversed(range(rank))) if call.attrs.axes is None else tuple(int(axis) % rank for axis in call.attrs.axes)


def _last_two_swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _keeps_matrices(before: Shape | None, after: Shape) -> bool:
    return before is not None and len(after) >= 2 and before[-2:] == after[-2:]


def _is_neutral(operand: relax.Expr, operator: str) -> bool:
    """Say whether an operand changes nothing: a constant 1 that is multiplied by, or one of zeros that is added."""
    if operator in {"relax.multiply", "relax.divide", "relax.power"}:
        return scalar_of(operand) == 1
    value = array_of(operand)
    return operator in {"relax.add", "relax.subtract"} and value is not None and not value.any()
