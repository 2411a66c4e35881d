"""Owns constants of a graph as arrays, with the names that they have in the user's model.

Knows nothing of what the constants are used for.

A constant's name is its span: passes that keep the constant keep it, and those that make another of it can give it on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

Array = np.ndarray[Any, Any]


def bind_params(mod: tvm.IRModule, names: Mapping[str, str], function: str = "main") -> tvm.IRModule:
    """Return the module with the parameters that an importer kept bound to their values, which then have names.

    The values are the function's attribute "params", for its last parameters, as TVM's importers leave them; `names` are those of the
    model by the parameter's name, which is taken where there is no other.
    """
    func = mod[function]
    values = list((func.attrs or {}).get("params", ()))
    if not values:
        return mod
    kept, bound = func.params[: -len(values)], func.params[-len(values) :]
    given = {
        var: constant(value.numpy(), str(var.ty.dtype.dtype), names.get(var.name, var.name))
        for var, value in zip(bound, values, strict=True)
    }
    attrs = {key: value for key, value in dict(func.attrs).items() if key not in {"params", "num_input"}}
    body = _Bind(given).visit_expr(func.body)
    fresh = mod.clone()
    fresh.update_func(
        mod.get_global_var(function), relax.Function(kept, body, func.ret_ty, func.is_pure, tvm.ir.make_node("ir.DictAttrs", **attrs))
    )
    return fresh


def constant(value: Array, dtype: str, name: str = "") -> Any:
    """Return a constant of an array, with a name in the model if one is known."""
    found = relax.const(np.ascontiguousarray(value.astype(dtype, copy=False)).reshape(value.shape), dtype)
    return tvm.ir.GenericConst(found.value, found.ty, _span(name)) if name else found


def array_of(expr: Any) -> Array | None:
    """Return the value of a constant; None for anything else."""
    return expr.value.numpy() if isinstance(expr, tvm.ir.GenericConst) and hasattr(expr.value, "numpy") else None


def name_of(expr: Any) -> str:
    """Return the name of a constant in the model; empty for anything else, and where it is not known."""
    span = expr.span if isinstance(expr, tvm.ir.GenericConst) else None
    return str(span.source_name.name) if span is not None else ""


def scalar_of(expr: Any) -> float | None:
    """Return the value of a constant with one element; None for anything else."""
    array = array_of(expr)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def _span(name: str) -> tvm.ir.Span:
    return tvm.ir.Span(tvm.ir.SourceName(name), 0, 0, 0, 0)


@relax.expr_functor.mutator
class _Bind(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, given: Mapping[Any, Any]) -> None:
        super().__init__()
        self._given = given

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self._given.get(var, var) if var in self._given else super().visit_var_(var)
