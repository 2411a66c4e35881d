"""Owns the converters of ONNX's optimizers: one update of each tensor, by the formulas of their definitions.

Knows nothing of gradients: a graph that asks for one is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.rewriting import dtype_of
from kerneldecl.compiler.model_import.onnx_elementwise import text

_Update = Callable[[Any, Any, Sequence[Any], Mapping[str, Any]], list[Any]]


def _optimizer(update: _Update, values: int) -> Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]:
    """Return the converter of an optimizer that keeps `values` tensors for each gradient, the optimized one among them.

    Inputs are the learning rate, the count of updates, then all tensors, all gradients, and all of each further value.
    """

    def convert(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
        rate, count, *rest = inputs
        tensors = len(rest) // (values + 1)
        found = []
        for at in range(tensors):
            given = rest[at::tensors]
            dtype = dtype_of(given[0])
            scalars = [builder.emit(op.astype(each, dtype)) for each in (rate, count)]
            regular = _times(builder, float(attrs.get("norm_coefficient", 0.0)), given[0])
            gradient = builder.emit(op.add(regular, given[1]))
            found.append(update(builder, scalars, [given[0], gradient, *given[2:]], attrs))
        return relax.Tuple([each[value] for value in range(values) for each in found])

    return convert


def _adagrad(builder: Any, scalars: Sequence[Any], given: Sequence[Any], attrs: Mapping[str, Any]) -> list[Any]:
    (rate, count), (x, gradient, squares), emit = scalars, given, builder.emit
    slowed = emit(op.add(_number(1.0, x), _times(builder, float(attrs.get("decay_factor", 0.0)), count)))
    squares = emit(op.add(squares, emit(op.multiply(gradient, gradient))))
    step = emit(op.divide(emit(op.multiply(emit(op.divide(rate, slowed)), gradient)), _root(builder, squares, attrs)))
    return [emit(op.subtract(x, step)), squares]


def _adam(builder: Any, scalars: Sequence[Any], given: Sequence[Any], attrs: Mapping[str, Any]) -> list[Any]:
    (rate, count), (x, gradient, mean, squares), emit = scalars, given, builder.emit
    alpha, beta = float(attrs.get("alpha", 0.9)), float(attrs.get("beta", 0.999))
    mean = _mixed(builder, alpha, mean, gradient)
    squares = _mixed(builder, beta, squares, emit(op.multiply(gradient, gradient)))
    left = [emit(op.subtract(_number(1.0, x), emit(op.power(_number(share, x), count)))) for share in (alpha, beta)]
    is_started = emit(op.greater(count, _number(0.0, x)))
    adjusted = emit(op.multiply(rate, emit(op.divide(emit(op.sqrt(left[1])), emit(op.where(is_started, left[0], _number(1.0, x)))))))
    rate = emit(op.where(is_started, adjusted, rate))
    step = emit(op.divide(emit(op.multiply(rate, mean)), _root(builder, squares, attrs)))
    kept = 1.0 - float(attrs.get("norm_coefficient_post", 0.0))
    return [_times(builder, kept, emit(op.subtract(x, step))), mean, squares]


def _momentum(builder: Any, scalars: Sequence[Any], given: Sequence[Any], attrs: Mapping[str, Any]) -> list[Any]:
    (rate, count), (x, gradient, momentum), emit = scalars, given, builder.emit
    is_started = emit(op.greater(count, _number(0.0, x)))
    beta = emit(op.where(is_started, _number(float(attrs["beta"]), x), _number(1.0, x)))
    old = _times(builder, float(attrs["alpha"]), momentum)
    momentum = emit(op.add(old, emit(op.multiply(beta, gradient))))
    is_nesterov = text(attrs["mode"]) == "nesterov"
    ahead = emit(op.add(gradient, _times(builder, float(attrs["alpha"]), momentum))) if is_nesterov else momentum
    return [emit(op.subtract(x, emit(op.multiply(rate, ahead)))), momentum]


def _mixed(builder: Any, share: float, old: Any, new: Any) -> Any:
    return builder.emit(op.add(_times(builder, share, old), _times(builder, 1.0 - share, new)))


def _root(builder: Any, squares: Any, attrs: Mapping[str, Any]) -> Any:
    return builder.emit(op.add(builder.emit(op.sqrt(squares)), _number(float(attrs.get("epsilon", 1e-6)), squares)))


def _times(builder: Any, factor: float, x: Any) -> Any:
    return builder.emit(op.multiply(_number(factor, x), x))


def _number(value: float, like: Any) -> Any:
    return relax.const(value, dtype_of(like))


adagrad, adam, momentum = (_optimizer(update, values) for update, values in ((_adagrad, 2), (_adam, 3), (_momentum, 2)))
