"""Owns the pass that computes positions, masks and tables that depend on no input of the model.

Knows nothing of weights in other layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from kerneldecl.compiler.graph.named_constants import Array, array_of, constant
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape

_LARGEST = 32 << 20
"""Bytes of a result: a larger one is computed by the model."""


@graph_pass
class FoldIndices(Rewriter):
    """Computes in NumPy what position embeddings, causal masks and rotary tables are made of, where all of it is known.

    torch.export writes them out as arange, comparisons of bool, cumsum and gathers. TVM's FoldConstant would compile a function for
    each, and its code generation has no `==` of two bool.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        shape, compute = static_shape(call), _OPERATORS.get(operator)
        if shape is None or compute is None or not isinstance(call.ty, relax.TensorType):
            return call
        dtype = dtype_of(call)
        if dtype not in _DTYPES or math.prod(shape) * np.dtype(dtype).itemsize > _LARGEST:
            return call
        args = [self._array(arg) for arg in call.args]
        if any(arg is None for arg in args):
            return call
        with np.errstate(all="ignore"):
            value = compute(call, shape, *args)
        is_whole = value is not None and np.size(value) == math.prod(shape)
        return constant(np.asarray(value).astype(dtype).reshape(shape), dtype) if is_whole else call

    def _array(self, arg: relax.Expr) -> Any:
        """Return an argument that is known: an array, a list of arrays, or an expression that is no tensor; None for another."""
        while isinstance(arg, relax.Var):
            arg = self.lookup_binding(arg)
        if isinstance(arg, relax.Tuple):
            fields = [self._array(field) for field in arg.fields]
            return None if any(field is None for field in fields) else fields
        if arg is None or isinstance(getattr(arg, "ty", None), relax.TensorType):
            return array_of(arg)
        return arg


_DTYPES = frozenset({"bool", "int8", "int32", "int64", "uint8", "float16", "float32", "float64"})


def _arange(_: relax.Call, __: Any, start: Any, stop: Any, step: Any) -> Array | None:
    ends = [_number(each) for each in (start, stop, step)]
    return None if any(each is None for each in ends) else np.arange(*ends)  # type: ignore[arg-type]


def _number(expr: Any) -> int | float | None:
    value = getattr(expr, "value", expr)
    return getattr(value, "value", value) if isinstance(getattr(value, "value", value), (int, float)) else None


def _extents(_: relax.Call, __: Any, of: Any) -> Array | None:
    extents = of.ty.values
    return np.array([int(extent) for extent in extents]) if extents is not None and all(map(_is_known, extents)) else None


def _is_known(extent: Any) -> bool:
    return isinstance(extent, tvm.tirx.IntImm)


def _sliced(_: relax.Call, __: Any, x: Array, *rest: Any) -> Array | None:
    given = [[_number(each) for each in part] for part in rest]
    if len(given) not in {3, 4} or any(None in part for part in given):
        return None
    axes, begins, ends, *steps = given
    at = [slice(None)] * x.ndim
    for axis, begin, end, step in zip(axes, begins, ends, steps[0] if steps else [1] * len(axes), strict=True):
        at[int(axis)] = slice(int(begin), int(end), int(step))  # type: ignore[arg-type]
    return x[tuple(at)]


def _taken(call: relax.Call, _: Any, x: Array, at: Array) -> Array | None:
    axis = call.attrs.axis
    return np.take(x, at, axis=int(axis)) if axis is not None and _is_inside(at, x.shape[int(axis)]) else None


def _gathered(call: relax.Call, _: Any, x: Array, at: Array) -> Array | None:
    axis = int(call.attrs.axis)
    return np.take_along_axis(x, at, axis=axis) if _is_inside(at, x.shape[axis]) else None


def _indexed(_: relax.Call, __: Any, x: Array, at: list[Array]) -> Array | None:
    return x[tuple(at)] if all(_is_inside(each, extent) for each, extent in zip(at, x.shape, strict=False)) else None


def _is_inside(at: Array, extent: int) -> bool:
    """Say whether there are indices, and all of them are of elements, counted from the first."""
    return bool(at.size) and bool(0 <= at.min() <= at.max() < extent)


def _power(_: relax.Call, __: Any, x: Array, exponent: Array) -> Array | None:
    return None if np.issubdtype(exponent.dtype, np.integer) and (exponent < 0).any() else np.power(x, exponent)


def _cumsum(call: relax.Call, _: Any, x: Array) -> Array | None:
    if call.attrs.exclusive or call.attrs.axis is None:
        return None
    return np.cumsum(x, axis=int(call.attrs.axis))


def _elements(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda _, __, *arrays: function(*arrays)


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "relax.arange": _arange,
    "relax.full": lambda _, shape, __, value: np.full(shape, value),
    "relax.full_like": lambda _, shape, __, value: np.full(shape, value),
    "relax.zeros": lambda _, shape, __: np.zeros(shape),
    "relax.ones": lambda _, shape, __: np.ones(shape),
    "relax.broadcast_to": lambda _, shape, x, __: np.broadcast_to(x, shape),
    "relax.reshape": lambda _, shape, x, __: x.reshape(shape),
    "relax.expand_dims": lambda _, shape, x: x.reshape(shape),
    "relax.squeeze": lambda _, shape, x: x.reshape(shape),
    "relax.astype": lambda _, __, x: x,
    "relax.concat": lambda call, _, xs: np.concatenate(xs, axis=int(call.attrs.axis)),
    "relax.strided_slice": _sliced,
    "relax.take": _taken,
    "relax.gather_elements": _gathered,
    "relax.index_tensor": _indexed,
    "relax.cumsum": _cumsum,
    "relax.shape_to_tensor": _extents,
    "relax.power": _power,
    "relax.where": _elements(np.where),
    **{
        f"relax.{name}": _elements(function)
        for name, function in {
            "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
            "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater, "greater_equal": np.greater_equal,
            "less": np.less, "less_equal": np.less_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
            "logical_not": np.logical_not, "bitwise_and": np.bitwise_and, "bitwise_or": np.bitwise_or, "bitwise_not": np.bitwise_not,
            "negative": np.negative, "cos": np.cos, "sin": np.sin, "divide": np.true_divide,
        }.items()
    },
}  # fmt: skip
"""The value of each operator from the call, its shape and its arguments; None where NumPy's differs."""
