"""Owns activations in a few instructions, for values that are rounded to 16 bits next.

Knows nothing of what computes the values or of who stores them.

gelu(x) is x * P(x), P being the normal distribution, and so max(x, 0) - |x| * P(-|x|). The logarithm of P(-u) is nearly a polynomial for
u over 0, so that one power of two is all that takes the slow unit for functions. Its coefficients are a minimax fit of ours, as far as
u * P(-u) counts. silu(x) is x * sigmoid(x), which takes that unit twice.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from tvm.ir import Call
from tvm.script import tirx
from tvm.tirx import Add, FloatImm, Mul

GELU = (-1.0000338603, -1.1507027834, -0.46032890027, -0.051449793689, 6.9232533632e-3, -4.5013839808e-4)
"""By rising power of u: log2(P(-u))."""
LARGE = 100.0
"""From here on P(-u) is 0 in float32; a larger u would make infinities times 0."""
RELATIVE_ERROR, ABSOLUTE_ERROR = 2.0**-14, 2.0**-19
"""Either is kept to, for any x: a fourth of half a unit in the last place of float16, or two millionths."""

_GELU_SOURCE = """
__device__ __forceinline__ float kd_quick_gelu(float x) {
  float positive, tail, u = fminf(fabsf(x), LARGEf);
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(positive) : "f"(x), "f"(0.0f));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(tail) : "f"(POLYNOMIAL));
  return fmaf(-u, tail, positive);
}
"""
_SILU_SOURCE = """
__device__ __forceinline__ float kd_quick_silu(float x) {
  float raised, gate;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(raised) : "f"(x * (FACTORf)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(gate) : "f"(1.0f + raised));
  return x * gate;
}
"""


def quickened(expr: Any, dtype: str) -> Any:
    """Return an expression with quick activations in place of those in float32, where what it becomes has 16 bits."""
    return tvm_ffi.structural_map(expr, [(Mul, _quick)], order="post") if dtype in ("float16", "bfloat16") else expr


def _quick(gemm: Any) -> Any:
    """Return a product as the activation that it is, or as it is."""
    for x, gate in ((gemm.a, gemm.b), (gemm.b, gemm.a)):
        if str(gemm.ty.dtype) == "float32":
            if _is_call(gate, "tirx.sigmoid") and _same(gate.args[0], x):
                return tirx.cuda.func_call("kd_quick_silu", x, source_code=_silu(), return_type="float32")
            if _is_normal_of(gate, x):
                return tirx.cuda.func_call("kd_quick_gelu", x, source_code=_gelu(), return_type="float32")
    return gemm


def _gelu() -> str:
    *lower, polynomial = [f"{coefficient:.9e}f" for coefficient in GELU]
    for coefficient in reversed(lower):
        polynomial = f"fmaf(u, {polynomial}, {coefficient})"
    return _GELU_SOURCE.replace("LARGE", str(LARGE)).replace("POLYNOMIAL", polynomial)


def _silu() -> str:
    return _SILU_SOURCE.replace("FACTOR", f"{-1 / math.log(2):.9e}")


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
