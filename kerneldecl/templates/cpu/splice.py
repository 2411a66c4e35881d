"""Owns expressions of a function's blocks in a kernel that is written beside it: other indices, other buffers, a sum from registers.

Knows nothing of what the expressions compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm.ir import TensorLoad, Var
from tvm_ffi import structural


class Element(NamedTuple):
    """How an element of a tensor is computed: variables that stand for its indices, and its value."""

    axes: tuple[Any, ...]
    value: Any


class Splice(NamedTuple):
    """Buffers of a function, and those of a kernel that stand for them."""

    buffers: tuple[Any, ...]
    """Arguments of the function."""
    args: tuple[Any, ...]
    """The kernel's, in the same order."""
    sums: Any
    """The function's buffer of a reduction's results, which the kernel has in registers."""

    def of(self, element: Element, index: Sequence[Any], total: Any = None) -> Any:
        """Return an element of a tensor; a reduction's result that it reads is `total`."""
        return self.expr(element.value, dict(zip(element.axes, index, strict=True)), total)

    def expr(self, expr: Any, values: dict[Any, Any], total: Any = None) -> Any:
        """Return an expression with other values for variables, which reads the kernel's buffers."""

        def load(node: Any) -> Any:
            if node.source.same_as(self.sums):
                return total
            position = next(at for at, each in enumerate(self.buffers) if each.same_as(node.source))
            return self.args[position][tuple(node.indices)]

        def variable(node: Any) -> Any:
            return next((value for var, value in values.items() if node.same_as(var)), node)

        return structural.structural_map(expr, [(TensorLoad, load), (Var, variable)])
