"""Owns vectorizable exp, erf and tanh for CPUs: polynomials in float32, where LLVM has no vector code.

Knows nothing of schedules, templates or rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx

HIGHEST, LOWEST = 88.722839, -103.98
"""Arguments beyond which exp is infinite or zero in float32."""
LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 as a sum, the first term short enough that its products with integers are exact."""
COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Coefficients of (e^r - 1 - r) / r^2 for |r| <= ln 2 / 2, highest power first (Cephes, expf.c, S. Moshier)."""


TANH_BEND = 0.625
TANH_COEFFICIENTS = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
"""Coefficients of (tanh x - x) / x^3 in x^2 for |x| below the bend, highest power first (Cephes, tanhf.c)."""
ERF_NUMERATOR = (
    -2.72614225801306e-10,
    2.77068142495902e-08,
    -2.10102402082508e-06,
    -5.69250639462346e-05,
    -7.34990630326855e-04,
    -2.95459980854025e-03,
    -1.60960333262415e-02,
)
ERF_DENOMINATOR = (-1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02)
"""Coefficients of erf(x) = x P(x^2) / Q(x^2) for |x| <= 4, highest power first (the rational minimax of Eigen and TVM's topi)."""


@functools.cache
def register() -> None:
    """Have later builds for LLVM compute exp, erf and tanh in vector code, and sigmoid, which lowers to exp.

    TVM leaves exp to LLVM and erf to the C library: one scalar call per element, 2 to 25 ns each. Its tanh cancels near 0.
    It compiles none of them for float16. float64 is left to TVM.
    """
    for name, function in {"exp": _exp, "tanh": _tanh, "erf": _erf}.items():
        tirx.register_intrin_lowering(f"tirx.{name}", target="llvm", f=functools.partial(_in_float32, function), level=99)


def _in_float32(function: Callable[[Any, str], Any], call: Any) -> Any:
    """Return the call as the function computes it; the call itself where its dtype is neither float32 nor float16."""
    (x,) = call.args
    dtype = str(x.ty.dtype)
    if dtype.startswith("float32"):
        return function(x, dtype)
    if dtype.startswith("float16"):
        wide = dtype.replace("float16", "float32")
        return tirx.Cast(dtype, function(tirx.Cast(wide, x), wide))
    return call


def _polynomial(x: Any, coefficients: Sequence[float], dtype: str) -> Any:
    first, *others = coefficients
    value = tirx.const(first, dtype)
    for coefficient in others:
        value = value * x + tirx.const(coefficient, dtype)
    return value


def _erf(x: Any, dtype: str) -> Any:
    inside = tirx.max(tirx.min(x, tirx.const(4.0, dtype)), tirx.const(-4.0, dtype))
    square = inside * inside
    y = inside * _polynomial(square, ERF_NUMERATOR, dtype) / _polynomial(square, ERF_DENOMINATOR, dtype)
    return tirx.Select(x == x, y, x)  # noqa: PLR0124  false for NaN alone


def _tanh(x: Any, dtype: str) -> Any:
    one, size, square = tirx.const(1.0, dtype), tirx.abs(x), x * x
    near = x * square * _polynomial(square, TANH_COEFFICIENTS, dtype) + x
    far = one - tirx.const(2.0, dtype) / (_exp(size + size, dtype) + one)
    return tirx.Select(size < tirx.const(TANH_BEND, dtype), near, tirx.Select(x < tirx.const(0.0, dtype), -far, far))


def _exp(x: Any, dtype: str) -> Any:
    whole = dtype.replace("float", "int")

    def const(value: float) -> Any:
        return tirx.const(value, dtype)

    def power_of_two(exponent: Any) -> Any:
        return tirx.reinterpret(dtype, (exponent + tirx.const(127, whole)) << tirx.const(23, whole))

    inside = tirx.max(tirx.min(x, const(88.73)), const(-104.0))
    n = tirx.floor(inside * const(LOG2_E) + const(0.5))
    r = inside - n * const(LN2_HIGH) - n * const(LN2_LOW)
    polynomial = _polynomial(r, COEFFICIENTS, dtype)
    # 2^n as the product of two powers: n may be 128, which is no exponent of a float32, or so low that the result is denormal.
    exponent = tirx.Cast(whole, n)
    half = exponent >> tirx.const(1, whole)
    y = (polynomial * r * r + r + const(1.0)) * power_of_two(half) * power_of_two(exponent - half)
    y = tirx.Select(x > const(HIGHEST), const(float("inf")), tirx.Select(x < const(LOWEST), const(0.0), y))
    return tirx.Select(x == x, y, x)  # noqa: PLR0124  false for NaN alone
