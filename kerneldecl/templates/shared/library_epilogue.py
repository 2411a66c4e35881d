"""Owns the epilogues that vendors' libraries know: an operand added, a bias, relu or gelu by tanh.

Knows nothing of what is accumulated, or of any one library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad, Var


class Result(NamedTuple):
    """An element of a result, at a place that variables stand for."""

    buffer: Any
    place: Sequence[Any]
    """Indices of the element."""
    fastest: Any
    """The variable along which the result is contiguous."""
    accum_dtype: str
    value: Callable[[Any, Sequence[Any]], Any]
    """(accumulator, values of the epilogue's operands there) -> the element to store there."""
    aux: Sequence[Any]
    """Loads of the epilogue's operands there."""


class FusedSteps(NamedTuple):
    """An epilogue of the steps that libraries know: activation(accumulator + add + bias)."""

    add: Any | None = None
    """The buffer of an operand of the result's shape and dtype."""
    bias: Any | None = None
    """The buffer of a vector along the result's contiguous axis."""
    activation: Literal["", "relu", "gelu_tanh"] = ""


def fused_steps(result: Result) -> FusedSteps | None:
    """Return an epilogue as steps that libraries know; None where it computes anything else."""
    total = Var("total", result.accum_dtype)
    values = [Var(f"aux{number}", str(load.ty.dtype)) for number, load in enumerate(result.aux)]
    expr = _uncast(result.value(total, values))
    activation, expr = _activation(expr)
    terms = _terms(expr)
    if sum(term.same_as(total) for term in terms) != 1 or len(terms) != 1 + len(values):
        return None
    steps = FusedSteps(activation=activation)
    for load in (result.aux[at] for at in _positions(terms, values)):
        if steps.bias is None and len(load.source.shape) == 1 and _reads(load, [result.fastest]) and _has_dtype(load, result.buffer):
            steps = steps._replace(bias=load.source)
        elif steps.add is None and _is_like(load, result.buffer) and _reads(load, result.place):
            steps = steps._replace(add=load.source)
        else:
            return None
    return steps


def _activation(expr: Any) -> tuple[Literal["", "relu", "gelu_tanh"], Any]:
    """Return an expression's activation and what that is applied to."""
    if isinstance(expr, tirx.Max) and _is_zero(expr.b):
        return "relu", expr.a
    if isinstance(expr, tirx.Mul) and isinstance(expr.a, tirx.Mul) and tvm_ffi.structural_equal(expr, _gelu_tanh(expr.a.b)):
        return "gelu_tanh", expr.a.b
    return "", expr


def _gelu_tanh(x: Any) -> Any:
    """Return x / 2 * (1 + tanh(sqrt(2 / pi) * x * (1 + 0.044715 * x * x))), in the order in which Relax and the rules multiply."""

    def const(value: float) -> Any:
        return tirx.const(value, x.ty.dtype)

    return const(0.5) * x * (const(1) + tirx.tanh(const(math.sqrt(2 / math.pi)) * x * (const(1) + const(0.044715) * x * x)))


def _positions(terms: Sequence[Any], values: Sequence[Any]) -> list[int]:
    """Return which of the values each term is, those that are none left out."""
    return [at for term in terms for at, value in enumerate(values) if term.same_as(value)]


def _terms(expr: Any) -> list[Any]:
    """Return the terms of a sum, without casts that widen them."""
    plain = _uncast(expr)
    return [*_terms(plain.a), *_terms(plain.b)] if isinstance(plain, tirx.Add) else [plain]


def _uncast(expr: Any) -> Any:
    return expr.value if isinstance(expr, tirx.Cast) else expr


def _is_zero(expr: Any) -> bool:
    return isinstance(expr, tirx.FloatImm | tirx.IntImm) and expr.value == 0


def _reads(load: Any, index: Sequence[Any]) -> bool:
    """Say whether a load reads a buffer at an index, whatever the width of either."""
    found = [_plain(each) for each in load.indices]
    wanted = [_plain(each) for each in index]
    return isinstance(load, TensorLoad) and len(found) == len(wanted) and all(map(tvm_ffi.structural_equal, found, wanted))


def _plain(index: Any) -> Any:
    """Return an index without casts and without additions of zero."""
    plain = _uncast(tirx.convert(index))
    if isinstance(plain, tirx.Add) and _is_zero(plain.a):
        return _plain(plain.b)
    return plain


def _is_like(load: Any, buffer: Any) -> bool:
    shapes = [[int(extent) for extent in each.shape] for each in (load.source, buffer)]
    return shapes[0] == shapes[1] and _has_dtype(load, buffer)


def _has_dtype(load: Any, buffer: Any) -> bool:
    return str(load.source.dtype) == str(buffer.dtype)
