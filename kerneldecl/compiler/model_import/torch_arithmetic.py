"""Owns the converters of torch's arithmetic that TVM's importer lacks or refuses: rounded divisions by numbers, distances of rows.

Knows nothing of files, nor of reductions over axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

from kerneldecl.compiler.model_import.torch_arguments import with_defaults
from kerneldecl.compiler.model_import.torch_contractions import dtype_of


def _rounded_division(node: Any, importer: Any) -> Any:
    """Convert div with a rounding mode, in the dtype that torch gives its result; a number has no dtype of its own."""
    left, right, *given = importer.retrieve_args(node)
    mode = given[0] if given else node.kwargs.get("rounding_mode")
    emit, dtype = importer.block_builder.emit, str(node.meta["val"].dtype).removeprefix("torch.")
    a, b = (_as_dtype(emit, each, dtype) for each in (left, right))
    if mode == "floor":
        return emit(relax.op.floor_divide(a, b))
    quotient = emit(relax.op.divide(a, b))
    return quotient if mode is None or "int" in dtype else emit(relax.op.trunc(quotient))


def _scaled_sum(combine: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return the converter of x + alpha * y, or of a difference; TVM's importer leaves alpha out."""

    def convert(node: Any, importer: Any) -> Any:
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1:
            return NotImplemented
        emit, dtype = importer.block_builder.emit, str(node.meta["val"].dtype).removeprefix("torch.")
        left, right = (_as_dtype(emit, each, dtype) for each in importer.retrieve_args(node))
        return emit(combine(left, emit(relax.op.multiply(right, relax.const(alpha, dtype)))))

    return convert


def _as_dtype(emit: Callable[[Any], Any], value: Any, dtype: str) -> Any:
    if not isinstance(value, relax.Expr):
        return relax.const(value, dtype)
    return value if dtype_of(value) == dtype else emit(relax.op.astype(value, dtype))


def _distances(node: Any, importer: Any) -> Any:
    """Convert _cdist_forward(x, y, p): the p-norm of the difference of each row of x and each row of y."""
    x, y, power = importer.retrieve_args(node)[:3]
    emit, dtype = importer.block_builder.emit, dtype_of(x)
    apart = emit(relax.op.abs(emit(relax.op.subtract(emit(relax.op.expand_dims(x, -2)), emit(relax.op.expand_dims(y, -3))))))
    if power == math.inf:
        return emit(relax.op.max(apart, -1))
    if power == 0:
        return emit(relax.op.sum(emit(relax.op.astype(emit(relax.op.not_equal(apart, relax.const(0, dtype))), dtype)), -1))
    if power == 1:
        return emit(relax.op.sum(apart, -1))
    if power == 2:
        return emit(relax.op.sqrt(emit(relax.op.sum(emit(relax.op.multiply(apart, apart)), -1))))
    total = emit(relax.op.sum(emit(relax.op.power(apart, relax.const(power, dtype))), -1))
    return emit(relax.op.power(total, relax.const(1 / power, dtype)))


def _elu(node: Any, importer: Any) -> Any:
    """Convert elu(x, alpha, scale, input_scale): torch writes selu as one with a scale."""
    x, alpha, scale, input_scale = with_defaults(importer.retrieve_args(node), 1, 1, 1, 1)
    emit, dtype = importer.block_builder.emit, dtype_of(x)
    scaled = x if input_scale == 1 else emit(relax.op.multiply(x, relax.const(input_scale, dtype)))
    below = relax.op.nn.relu(relax.op.subtract(relax.const(1, dtype), relax.op.exp(scaled)))
    total = emit(relax.op.add(relax.op.multiply(relax.const(-alpha, dtype), below), relax.op.nn.relu(x)))
    return total if scale == 1 else emit(relax.op.multiply(total, relax.const(scale, dtype)))


ARITHMETIC: Mapping[str, Callable[[Any, Any], Any]] = {
    "div.Tensor_mode": _rounded_division,
    "div.Scalar_mode": _rounded_division,
    **{f"add.{overload}": _scaled_sum(relax.op.add) for overload in ("Tensor", "Scalar")},
    **{f"sub.{overload}": _scaled_sum(relax.op.subtract) for overload in ("Tensor", "Scalar")},
    "elu.default": _elu,
    "_cdist_forward.default": _distances,
}
"""Converters by the names of torch's operators."""
