"""Owns the pass that turns permutations, reshapes and pooling that are something simpler into it.

Knows nothing of what stands before and after.
"""

from __future__ import annotations

from tvm import relax

from kerneldecl.compiler.graph.rewriting import Rewriter, graph_pass, static_shape


@graph_pass
class SimplifyShapes(Rewriter):
    """Makes permutations that move only axes of extent 1 reshapes, which are views, and adaptive pooling to one pixel a mean.

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
        return self._reshaped(call.args[0], shape) if operator == "relax.reshape" else call

    def _reshaped(self, value: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        while (before := self.producer(value, "relax.reshape")) is not None:
            value = before.args[0]
        return value if static_shape(value) == shape else relax.op.reshape(value, shape)


def _moves_only_ones(call: relax.Call) -> bool:
    extents = static_shape(call.args[0])
    if extents is None:
        return False
    axes = reversed(range(len(extents))) if call.attrs.axes is None else call.attrs.axes
    moved = [int(axis) for axis in axes if extents[int(axis)] != 1]
    return moved == sorted(moved)
