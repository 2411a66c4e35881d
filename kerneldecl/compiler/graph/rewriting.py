"""Owns what the passes of a graph share: a mutator over a module's Relax functions, made a pass, and what is known of an expression.

Knows nothing of what is rewritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax


class Rewriter(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    """Rewrites calls of operators, from the first to the last: a subclass gives `rewritten`, and `graph_pass` makes a pass of it."""

    def __init__(self, mod: tvm.IRModule | None = None) -> None:
        super().__init__(mod)
        self._visited: relax.Function | None = None
        self._counted: Counter[Any] | None = None

    def rewritten_module(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with its Relax functions rewritten; those that a fusion made stay as they are."""
        for var, func in mod.functions_items():
            if isinstance(func, relax.Function) and not (func.attrs or {}).get("Primitive"):
                self.begin(func)
                self.builder_.update_func(var, self.visit_expr(func))
        # A pass that looks for the producer of a value stops at a variable that is another's alias.
        tidied = relax.transform.CanonicalizeBindings()(self.builder_.get())
        return relax.transform.DeadCodeElimination()(tidied)

    def begin(self, func: relax.Function) -> None:
        """Note what the rewriting of a function needs to know of all of it."""
        self._visited, self._counted = func, None

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:  # noqa: ARG002  # for subclasses
        """Return what stands for a call of an operator, whose arguments are rewritten already; the call itself to keep it."""
        return call

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        call = super().visit_call_(call)
        return self.rewritten(call, str(call.op.name)) if isinstance(call.op, tvm.ir.Op) else call

    def call_of(self, value: relax.Expr) -> relax.Call | None:
        """Return the call of an operator that gives a value; None where another expression does."""
        value = self.known(value)
        bound = self.lookup_binding(value) if isinstance(value, relax.Var) else value
        return bound if isinstance(bound, relax.Call) and isinstance(bound.op, tvm.ir.Op) else None

    def producer(self, value: relax.Expr, operator: str) -> relax.Call | None:
        """Return the call of this operator that gives a value; None where another expression does."""
        call = self.call_of(value)
        return call if call is not None and call.op.name == operator else None

    def known(self, value: relax.Expr) -> relax.Expr:
        """Return the constant or the first variable that a variable stands for; the value itself where it is another expression."""
        while isinstance(value, relax.Var) and isinstance(bound := self.lookup_binding(value), (relax.Var, tvm.ir.GenericConst)):
            value = bound
        return value

    def emitted(self, expr: relax.Expr) -> relax.Expr:
        return self.builder_.emit(expr)

    def is_read_once(self, value: relax.Expr) -> bool:
        if not isinstance(value, relax.Var):
            return True
        if self._counted is None:  # few passes ask, and counting takes as long as a pass
            self._counted = _reads(self._visited) if self._visited is not None else Counter()
        return self._counted[value] <= 1


def graph_pass(rewriter: type[Rewriter]) -> Callable[..., tvm.transform.Pass]:
    """Return the pass that rewrites a module's functions, under the rewriter's name and with its documentation.

    Arguments of the pass are those of the rewriter behind the module.
    """
    mutator = relax.expr_functor.mutator(rewriter)

    class _Pass:
        def __init__(self, *args: Any) -> None:
            self.args = args

        def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
            return mutator(mod, *self.args).rewritten_module(mod)

    _Pass.__name__, _Pass.__doc__, _Pass.__module__ = rewriter.__name__, rewriter.__doc__, rewriter.__module__
    made: Callable[..., tvm.transform.Pass] = tvm.transform.module_pass(_Pass, opt_level=0, name=rewriter.__name__)
    return made


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
