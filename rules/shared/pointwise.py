"""Owns the operations that work on one element at a time: in TE, in NumPy, and what they cost.

Knows nothing of shapes, attributes or which rule applies them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kerneldecl.arrays import Array
from kerneldecl.lazy import np

Reader = Callable[..., Any]
"""A TE tensor, or a function that takes indices to an expression just as a tensor does."""


@dataclass(frozen=True)
class Pointwise:
    """One operation: how many operands it has, its cost for an element, and its value in NumPy."""

    operands: int
    flops: int
    """Operations for one element; a function such as exp counts as one."""
    reference: Callable[..., Array]
    is_float_only: bool = False
    is_rounded: bool = False
    """True for operations of several roundings, which would show in a narrow dtype: they are computed in float32."""


_STEPS = 64
"""Points per unit in the table of erf; where |x| > 6, erf is 1 to the last bit."""
_ORDER = 7


@functools.cache
def _points() -> Array:
    return np.asarray(np.arange(-6 * _STEPS, 6 * _STEPS + 1) / _STEPS)


@functools.cache
def _erf_terms() -> Array:
    """Return the coefficients of erf's Taylor polynomial about each point, by rising power.

    The derivatives are 2 / sqrt(pi) * (-1)^n * H_n(x) * exp(-x^2), with the Hermite polynomials H_n.
    """
    points = _points()
    hermite = [np.ones_like(points), 2 * points]
    for n in range(1, _ORDER - 1):
        hermite.append(2 * points * hermite[n] - 2 * n * hermite[n - 1])
    slope = 2 / math.sqrt(math.pi) * np.exp(-np.square(points))
    rest = [slope * (-1) ** n * h / math.factorial(n + 1) for n, h in enumerate(hermite)]
    return np.stack([np.vectorize(math.erf)(points), *rest])


def _erf(x: Array) -> Array:
    """Return erf with an error of at most 1e-15. NumPy has none, and math.erf for each element would take seconds."""
    near = np.clip(x, -6, 6)
    at = np.nan_to_num(np.rint(near * _STEPS)).astype(np.intp) + 6 * _STEPS
    distance = near - _points()[at]
    *lower, highest = _erf_terms()
    value = highest[at]
    for terms in lower[::-1]:
        value = value * distance + terms[at]
    return np.asarray(value.astype(x.dtype, copy=False))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


def _hard_sigmoid(x: Array) -> Array:
    return np.asarray(np.clip(x + 3, 0, 6) / 6)


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1.0 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))))


def _numpy(name: str) -> Callable[..., Array]:
    """Return NumPy's function of a name, which is looked for when it is called."""

    def function(*operands: Array) -> Array:
        return np.asarray(getattr(np, name)(*operands))

    return function


OPERATIONS = {
    "copy": Pointwise(1, 0, _numpy("positive")),
    "add": Pointwise(2, 1, _numpy("add")),
    "sub": Pointwise(2, 1, _numpy("subtract")),
    "mul": Pointwise(2, 1, _numpy("multiply")),
    "div": Pointwise(2, 1, _numpy("divide"), is_float_only=True),
    "maximum": Pointwise(2, 1, _numpy("maximum")),
    "minimum": Pointwise(2, 1, _numpy("minimum")),
    "neg": Pointwise(1, 1, _numpy("negative")),
    "abs": Pointwise(1, 1, _numpy("abs")),
    "relu": Pointwise(1, 1, _relu),
    "sqrt": Pointwise(1, 1, _numpy("sqrt"), is_float_only=True),
    "exp": Pointwise(1, 1, _numpy("exp"), is_float_only=True, is_rounded=True),
    "tanh": Pointwise(1, 1, _numpy("tanh"), is_float_only=True, is_rounded=True),
    "sigmoid": Pointwise(1, 1, _sigmoid, is_float_only=True, is_rounded=True),
    "gelu": Pointwise(1, 5, lambda x: 0.5 * x * (1.0 + _erf(x * 0.5**0.5)), is_float_only=True, is_rounded=True),
    "gelu_tanh": Pointwise(1, 9, _gelu_tanh, is_float_only=True, is_rounded=True),
    "silu": Pointwise(1, 2, lambda x: x * _sigmoid(x), is_float_only=True, is_rounded=True),
    "silu_mul": Pointwise(2, 3, lambda x, y: x * _sigmoid(x) * y, is_float_only=True, is_rounded=True),
    "gelu_mul": Pointwise(2, 6, lambda x, y: 0.5 * x * (1.0 + _erf(x * 0.5**0.5)) * y, is_float_only=True, is_rounded=True),
    "gelu_tanh_mul": Pointwise(2, 10, lambda x, y: _gelu_tanh(x) * y, is_float_only=True, is_rounded=True),
    "relu6": Pointwise(1, 2, lambda x: np.clip(x, 0, 6)),
    "hard_sigmoid": Pointwise(1, 4, _hard_sigmoid, is_float_only=True, is_rounded=True),
    "hard_swish": Pointwise(1, 5, lambda x: x * _hard_sigmoid(x), is_float_only=True, is_rounded=True),
}


def stage(shape: Any, name: str, expression: Callable[..., Any], *operands: Reader) -> Any:
    """Return a TE tensor whose elements are `expression` of the operands' elements at the same indices."""
    from tvm import te

    return te.compute(shape, lambda *i: expression(*(read(*i) for read in operands)), name=name)


def cast(operand: Reader, dtype: str) -> Reader:
    """Return a reader of the operand's elements as `dtype`."""
    return lambda *i: operand(*i).astype(dtype)


def lower(op: str, shape: Any, name: str, dtype: str, *operands: Reader) -> Any:
    """Return the TE tensor `name` that applies `op` to operands of `dtype`.

    The stages are those that Relax legalises the operator to, so that a kernel tuned here is found there.
    """
    from tvm import te, tirx

    def const(value: float) -> Any:
        return tirx.const(value, dtype)

    if op == "silu":
        gate = stage(shape, f"{name}_sigmoid", te.sigmoid, *operands)
        return stage(shape, name, operator.mul, *operands, gate)
    if op == "gelu":
        scaled = stage(shape, f"{name}_scaled", lambda x: x * const(0.5**0.5), *operands)
        erf = stage(shape, f"{name}_erf", te.erf, scaled)
        half = stage(shape, f"{name}_half", lambda e: e * const(0.5), erf)
        gate = stage(shape, f"{name}_gate", lambda h: const(0.5) + h, half)
        return stage(shape, name, operator.mul, *operands, gate)
    if op == "gelu_tanh":
        return _lower_gelu_tanh(shape, name, const, *operands)
    if op in {"relu6", "hard_sigmoid", "hard_swish"}:
        shifted = operands[0] if op == "relu6" else stage(shape, f"{name}_shifted", lambda x: x + const(3), *operands)
        positive = stage(shape, f"{name}_relu", lambda x: te.max(x, const(0)), shifted)
        if op == "relu6":
            return stage(shape, name, lambda x: te.min(x, const(6)), positive)
        gate = stage(shape, f"{name}_gate", lambda x: te.min(x, const(6)), positive)
        if op == "hard_swish":
            gate = stage(shape, f"{name}_gated", operator.mul, *operands, gate)
        return stage(shape, name, lambda x: te.div(x, const(6)), gate)
    expressions: dict[str, Callable[..., Any]] = {
        "copy": lambda x: x,
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "div": te.div,
        "maximum": te.max,
        "minimum": te.min,
        "neg": lambda x: x * const(-1),
        "abs": te.abs,
        "relu": lambda x: te.max(x, const(0)),
        "sqrt": te.sqrt,
        "exp": te.exp,
        "tanh": te.tanh,
        "sigmoid": te.sigmoid,
        "silu_mul": lambda x, y: x * te.sigmoid(x) * y,
        "gelu_mul": lambda x, y: x * (const(0.5) + te.erf(x * const(0.5**0.5)) * const(0.5)) * y,
        "gelu_tanh_mul": lambda x, y: (
            const(0.5) * x * (const(1) + te.tanh(const(math.sqrt(2 / math.pi)) * x * (const(1) + const(0.044715) * x * x))) * y
        ),
    }
    return stage(shape, name, expressions[op], *operands)


def _lower_gelu_tanh(shape: Any, name: str, const: Callable[[float], Any], x: Reader) -> Any:
    """Return x / 2 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x))), in the stages of Relax."""
    from tvm import te

    half = stage(shape, f"{name}_half", lambda v: const(0.5) * v, x)
    scaled = stage(shape, f"{name}_scaled", lambda v: const(math.sqrt(2 / math.pi)) * v, x)
    linear = stage(shape, f"{name}_linear", lambda v: const(0.044715) * v, x)
    square = stage(shape, f"{name}_square", operator.mul, linear, x)
    factor = stage(shape, f"{name}_factor", lambda v: const(1) + v, square)
    inner = stage(shape, f"{name}_inner", operator.mul, scaled, factor)
    tanh = stage(shape, f"{name}_tanh", te.tanh, inner)
    gate = stage(shape, f"{name}_gate", lambda v: const(1) + v, tanh)
    return stage(shape, name, operator.mul, half, gate)
