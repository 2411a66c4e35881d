"""Owns activations in a few instructions, for values that are rounded to 16 bits next.

Knows nothing of what computes the values or of who stores them.

gelu(x) is x * P(x), P being the normal distribution. log(P(x) / P(-x)) is odd and nearly a polynomial, so that P is taken for
the sigmoid of one, as silu is x * sigmoid(x). Its coefficients are a minimax fit of ours.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from tvm.ir import Call
from tvm.script import tirx
from tvm.tirx import Add, FloatImm, Mul

GELU = (-2.301805037, -0.105569882, 4.88066322e-4, 7.15384601e-5, -2.54587413e-6)
"""By rising power of x * x: log2(P(-x) / P(x)) / x."""
SILU = (-1 / math.log(2),)
"""log2(exp(-x)) / x."""
RELATIVE_ERROR, ABSOLUTE_ERROR = 2.0**-14, 2.0**-19
"""Either is kept to, for any x: a fourth of half a unit in the last place of float16, or two millionths."""

_SOURCE = """
__device__ __forceinline__ float NAME(float x) {
  float raised, gate, t = x * x;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(raised) : "f"(x * (POLYNOMIAL)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(gate) : "f"(1.0f + raised));
  return x * gate;
}
"""


def quickened(expr: Any, dtype: str) -> Any:
    """Return an expression with quick activations in place of those in float32, where what it becomes has 16 bits."""
    return tvm_ffi.structural_map(expr, [(Mul, _quick)], order="post") if dtype in ("float16", "bfloat16") else expr


def _quick(product: Any) -> Any:
    """Return a product as the activation that it is, or as it is."""
    for x, gate in ((product.a, product.b), (product.b, product.a)):
        if str(product.ty.dtype) == "float32":
            if _is_call(gate, "tirx.sigmoid") and _same(gate.args[0], x):
                return _call("kd_quick_silu", SILU, x)
            if _is_normal_of(gate, x):
                return _call("kd_quick_gelu", GELU, x)
    return product


def _call(name: str, coefficients: tuple[float, ...], x: Any) -> Any:
    *lower, polynomial = [f"{coefficient:.9e}f" for coefficient in coefficients]
    for coefficient in reversed(lower):
        polynomial = f"fmaf(t, {polynomial}, {coefficient})"
    source = _SOURCE.replace("NAME", name).replace("POLYNOMIAL", polynomial)
    return tirx.cuda.func_call(name, x, source_code=source, return_type="float32")


def _is_normal_of(gate: Any, x: Any) -> bool:
    """Say whether an expression is 0.5 + erf(x * sqrt(0.5)) * 0.5."""
    erf = _beside(_beside(gate, Add, 0.5), Mul, 0.5)
    return _is_call(erf, "tirx.erf") and _same(_beside(erf.args[0], Mul, math.sqrt(0.5)), x)


def _beside(expr: Any, kind: type, constant: float) -> Any:
    """Return what a constant is added to or multiplied by; None if that is not what an expression does."""
    if isinstance(expr, kind):
        for one, other in ((expr.a, expr.b), (expr.b, expr.a)):  # type: ignore[attr-defined]
            if isinstance(one, FloatImm) and math.isclose(one.value, constant, rel_tol=1e-6):
                return other
    return None


def _is_call(expr: Any, name: str) -> bool:
    return isinstance(expr, Call) and getattr(expr.op, "name", "") == name


def _same(one: Any, other: Any) -> bool:
    return one is not None and bool(tvm_ffi.structural_equal(one, other))
