"""Owns what the passes of a graph share: a mutator over a module's Relax functions, and what is known of an expression.

Knows nothing of what is rewritten.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import tvm
from tvm import relax


class Rewriter(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Rewrites calls of operators, from the first to the last; a subclass gives `rewritten` and has the decorator `mutator`."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self._reads: Counter[Any] = Counter()

    def rewritten_module(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with its Relax functions rewritten; those that a fusion made stay as they are."""
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs or {}).get("Primitive"):
                self._reads = _reads(func)
                self.builder_.update_func(var, self.visit_expr(func))
        # A pass that looks for the producer of a value stops at a variable that is another's alias.
        tidied = relax.transform.CanonicalizeBindings()(self.builder_.get())
        return relax.transform.DeadCodeElimination()(tidied)

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:  # noqa: ARG002  # for subclasses
        """Return what stands for a call of an operator, whose arguments are rewritten already; the call itself to keep it."""
        return call

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        return self.rewritten(call, str(call.op.name)) if isinstance(call.op, tvm.ir.Op) else call

    def producer(self, value: relax.Expr, operator: str) -> relax.Call | None:
        """Return the call of an operator that gives a value; None where another expression does."""
        bound = self.lookup_binding(value) if isinstance(value, relax.Var) else value
        is_operator = isinstance(bound, relax.Call) and isinstance(bound.op, tvm.ir.Op) and bound.op.name == operator
        return bound if is_operator else None

    def known(self, value: relax.Expr) -> relax.Expr:
        """Return the constant that a variable stands for; the value itself where it is none."""
        bound = self.lookup_binding(value) if isinstance(value, relax.Var) else value
        return bound if isinstance(bound, tvm.ir.GenericConst) else value

    def is_read_once(self, value: relax.Expr) -> bool:
        return not isinstance(value, relax.Var) or self._reads[value] <= 1


def _reads(func: relax.Function) -> Counter[Any]:
    """Return how often each variable is read in a function's body."""
    reads: Counter[Any] = Counter()

    def note(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call):
            reads.update(arg for arg in expr.args if isinstance(arg, relax.Var))
        elif isinstance(expr, relax.Tuple):
            reads.update(arg for arg in expr.fields if isinstance(arg, relax.Var))
        elif isinstance(expr, relax.TupleGetItem):
            reads.update([expr.tuple_value])
        elif isinstance(expr, relax.SeqExpr):
            reads.update([expr.body])

    relax.analysis.post_order_visit(func.body, note)
    return reads


def static_shape(expr: relax.Expr) -> tuple[int, ...] | None:
    """Return the extents of a tensor; None where one is not known or the value is no tensor."""
    shape = getattr(expr.ty, "shape", None)
    if not isinstance(shape, relax.ShapeExpr) or not all(isinstance(extent, tvm.tirx.IntImm) for extent in shape.values):
        return None
    return tuple(int(extent) for extent in shape.values)


def dtype_of(expr: relax.Expr) -> str:
    return str(expr.ty.dtype.dtype)
