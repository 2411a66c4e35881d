"""Owns the rewriting of matmuls to ones of two or three axes, which rules compute, with views before and behind.

Knows nothing of rules, nor of what follows matmuls.
"""

from __future__ import annotations

import math

from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import scalar_of
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.view_rewriting import ViewRewriter
from kerneldecl.compiler.graph.views import Shape, View


class MatmulRewriter(ViewRewriter):
    """Rewrites matmuls; transposes of rows stay before linear layers, unless `sinks_rows`."""

    sinks_rows = False

    def matmul(self, call: relax.Call, shape: Shape) -> relax.Expr:
        """Return a matmul by a matrix as one of two matrices, and one of more axes as one with one batch axis."""
        a, b = call.args
        spread = self.producer(b, "relax.broadcast_to")
        if spread is not None and len(static_shape(spread.args[0]) or ()) == 2:
            b = spread.args[0]
        of_a, of_b = static_shape(a) or (), static_shape(b) or ()
        if 0 in (*shape, *of_a):
            return call
        if len(of_b) == 2 and of_a[:-1] == shape[:-1]:
            return self._linear(call, a, b)
        if len(of_a) == len(of_b) >= 3 and of_a[:-2] == of_b[:-2]:
            batch = math.prod(of_a[:-2])
            a, b = (self.reshaped(each, (batch, *given[-2:])) for each, given in ((a, of_a), (b, of_b)))
            a, b, scale = self._unscaled(a, b)
            product = self.emitted(op.matmul(*self._ungrouped(a, b), out_dtype=call.attrs.out_dtype))
            if scale != 1.0:
                product = self.emitted(op.multiply(product, relax.const(scale, dtype_of(call))))
            return self.reshaped(product, shape)
        return call

    def _linear(self, call: relax.Call, a: relax.Expr, b: relax.Expr) -> relax.Expr:
        """Return a matmul of two matrices; with `sinks_rows` the rows of A in the order of what it is a view of."""
        (*outer, k), columns = static_shape(a) or (), (static_shape(b) or ())[-1]
        source, view = self.view_of(a)
        rows = [part for axis in view.axes[:-1] for part in axis] if view is not None else []
        if view is None or rows == sorted(rows) or not self.sinks_rows:
            if len(outer) == 1 and b.same_as(call.args[1]):
                return call
            flat = self.reshaped(a, (math.prod(outer), k))
            return self.reshaped(self.emitted(op.matmul(flat, b, out_dtype=call.attrs.out_dtype)), (*outer, columns))
        in_order = sorted(rows)
        extents = tuple(view.parts[part] for part in in_order)
        flat = self.viewed(source, View(view.parts, (tuple(in_order), view.axes[-1])))
        split = self.reshaped(self.emitted(op.matmul(flat, b, out_dtype=call.attrs.out_dtype)), (*extents, columns))
        return self.reshaped(self.permuted(split, (*(in_order.index(part) for part in rows), len(rows))), (*outer, columns))

    def _unscaled(self, *operands: relax.Expr) -> tuple[relax.Expr, relax.Expr, float]:
        """Return both operands without the numbers that they are multiplied by, and these numbers' product."""
        bare, scale = [], 1.0
        for operand in operands:
            source, view = self.view_of(operand)
            scaled = self.producer(source, "relax.multiply")
            factor = scalar_of(scaled.args[1]) if scaled is not None else None
            is_scaled = scaled is not None and factor is not None and "float" in dtype_of(operand)
            if view is None or scaled is None or factor is None or not is_scaled or static_shape(scaled.args[0]) != static_shape(scaled):
                bare.append(operand)
                continue
            scale *= factor
            bare.append(self.viewed(scaled.args[0], view))
        return bare[0], bare[1], scale

    def _ungrouped(self, a: relax.Expr, b: relax.Expr) -> tuple[relax.Expr, relax.Expr]:
        """Return operands whose B is not repeated: rows of A that share a matrix of B, as in grouped-query attention, are one A."""
        source, view = self.view_of(b)
        repeat = self.producer(source, "relax.broadcast_to")
        before, after = (static_shape(repeat.args[0]) or (), static_shape(repeat) or ()) if repeat is not None else ((), ())
        if repeat is None or view is None or len(after) < 3 or before != (*after[:-3], 1, *after[-2:]):
            return a, b
        heads, repeats = math.prod(after[:-3]), after[-3]
        whole = View.of(after)
        matrices = whole.reshaped((heads * repeats, *after[-2:])) if whole is not None else None
        if matrices is None or view.joined() not in {matrices.joined(), matrices.permuted((0, 2, 1)).joined()}:
            return a, b
        _, m, k = static_shape(a) or (0, 0, 0)
        shared = self.reshaped(repeat.args[0], (heads, *after[-2:]))
        is_swapped = view.joined() != matrices.joined()
        return self.reshaped(a, (heads, repeats * m, k)), self.permuted(shared, (0, 2, 1)) if is_swapped else shared
