"""Owns constants of a graph as arrays, with the names that they have in the user's model.

Knows nothing of what the constants are used for.

A constant's name is its span: passes that keep the constant keep it, and those that make another of it can give it on.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

Array = np.ndarray[Any, Any]


def bind_params(mod: tvm.IRModule, values: Mapping[str, Any], names: Mapping[str, str], function: str = "main") -> tvm.IRModule:
    """Return the module with parameters of a function bound to values, by the parameters' names; `names` are those in the model."""
    func = mod[function]
    given = {
        var: constant(values[var.name].numpy(), str(var.ty.dtype.dtype), names.get(var.name, var.name))
        for var in func.params
        if var.name in values
    }
    kept = [var for var in func.params if var not in given]
    attrs = {key: value for key, value in dict(func.attrs or {}).items() if key not in {"params", "num_input"}}
    fresh = mod.clone()
    bound = relax.Function(kept, _Bind(given).visit_expr(func.body), func.ret_ty, func.is_pure)
    fresh.update_func(mod.get_global_var(function), bound.with_attrs(attrs) if attrs else bound)
    return fresh


def name_by_value(mod: tvm.IRModule, named: Iterable[tuple[str, Array]]) -> tvm.IRModule:
    """Return the module with names for the constants that hold these arrays; equal arrays are named in the order given.

    An importer that makes constants of a file's weights does not say which is which.
    """
    waiting: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for name, array in named:
        waiting[_identity(array)].append(name)
    name_constants = _NameConstants(mod, waiting)
    for var, func in mod.functions_items():
        if isinstance(func, relax.Function):
            name_constants.builder_.update_func(var, name_constants.visit_expr(func))
    return name_constants.builder_.get()


def _identity(array: Array) -> tuple[Any, ...]:
    return array.shape, str(array.dtype), hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest()


def constant(value: Array, dtype: str, name: str = "") -> Any:
    """Return a constant of an array, with a name in the model if one is known."""
    found = relax.const(np.ascontiguousarray(value.astype(dtype, copy=False)).reshape(value.shape), dtype)
    return tvm.ir.GenericConst(found.value, found.ty, _span(name)) if name else found


def is_array(expr: Any) -> bool:
    """Say whether an expression is a constant array."""
    return isinstance(expr, tvm.ir.GenericConst) and hasattr(expr.value, "numpy")


def array_of(expr: Any) -> Array | None:
    """Return a copy of the value of a constant; None for anything else."""
    return expr.value.numpy() if is_array(expr) else None


def name_of(expr: Any) -> str:
    """Return the name of a constant in the model; empty for anything else, and where it is not known."""
    span = expr.span if isinstance(expr, tvm.ir.GenericConst) else None
    return str(span.source_name.name) if span is not None else ""


def scalar_of(expr: Any) -> float | None:
    """Return the value of a constant with one element; None for anything else."""
    array = array_of(expr) if is_array(expr) and math.prod(expr.value.shape) == 1 else None
    return None if array is None else float(array.reshape(-1)[0])


def _span(name: str) -> tvm.ir.Span:
    return tvm.ir.Span(tvm.ir.SourceName(name), 0, 0, 0, 0)


@relax.expr_functor.mutator
class _Bind(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, given: Mapping[Any, Any]) -> None:
        super().__init__()
        self._given = given

    def visit_var_(self, var: relax.Var) -> relax.Expr:
        return self._given.get(var, var) if var in self._given else super().visit_var_(var)


@relax.expr_functor.mutator
class _NameConstants(relax.PyExprMutator):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, mod: tvm.IRModule, waiting: dict[tuple[Any, ...], list[str]]) -> None:
        super().__init__(mod)
        self._waiting = waiting
        self._named: dict[Any, Any] = {}

    def visit_generic_const_(self, found: Any) -> Any:
        if found not in self._named:
            array = array_of(found)
            names = self._waiting.get(_identity(array), []) if array is not None else []
            name = names.pop(0) if len(names) > 1 else "".join(names)
            self._named[found] = tvm.ir.GenericConst(found.value, found.ty, _span(name)) if name else found
        return self._named[found]
