"""Owns the pass that turns permutations, reshapes, pooling and reductions that are something simpler into it.

Knows nothing of what stands before and after.
"""

from __future__ import annotations

from tvm import relax

from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape

_REDUCTIONS = frozenset({"relax.sum", "relax.mean", "relax.max", "relax.min", "relax.prod"})


@graph_pass
class SimplifyShapes(Rewriter):
    """Makes reshapes, which are views, of permutations and reductions of axes of extent 1 alone, and of pooling to one pixel a mean.

    A reshape of a reshape becomes one.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        shape = static_shape(call)
        if operator == "relax.nn.adaptive_avg_pool2d":
            layout = str(call.attrs.layout)
            is_global = shape is not None and all(shape[layout.index(axis)] == 1 for axis in "HW")
            return relax.op.mean(call.args[0], [layout.index("H"), layout.index("W")], keepdims=True) if is_global else call
        if shape is None:
            return call
        if operator == "relax.permute_dims" and _moves_only_ones(call):
            return self._reshaped(call.args[0], shape)
        if operator in _REDUCTIONS and _reduces_only_ones(call):
            return self._reshaped(call.args[0], shape)
        return self._reshaped(call.args[0], shape) if operator == "relax.reshape" else call

    def _reshaped(self, value: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        while (before := self.producer(value, "relax.reshape")) is not None:
            value = before.args[0]
        return value if static_shape(value) == shape else relax.op.reshape(value, shape)


def _reduces_only_ones(call: relax.Call) -> bool:
    extents = static_shape(call.args[0])
    if extents is None or dtype_of(call.args[0]) != dtype_of(call):
        return False
    axes = range(len(extents)) if call.attrs.axis is None else call.attrs.axis
    return all(extents[int(axis)] == 1 for axis in axes)


def _moves_only_ones(call: relax.Call) -> bool:
    extents = static_shape(call.args[0])
    if extents is None:
        return False
    axes = reversed(range(len(extents))) if call.attrs.axes is None else call.attrs.axes
    moved = [int(axis) for axis in axes if extents[int(axis)] != 1]
    return moved == sorted(moved)
