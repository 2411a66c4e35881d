"""Owns fast math: gelu and silu in a few instructions, for values that are rounded to 16 bits next.

Knows nothing of what computes the values or stores them.

gelu(x) = x * P(x) = max(x, 0) - |x| * P(-|x|), where P is the normal distribution. For u > 0, log2(P(-u)) is nearly a polynomial, so a
gelu takes one instruction of the special function unit, a power of two. The coefficients are our minimax fit of the error of u * P(-u).
silu(x) = x * sigmoid(x) takes two instructions of that unit.
"""

from __future__ import annotations

import math
from typing import Any

import tvm_ffi
from tvm.ir import Call
from tvm.script import tirx
from tvm.tirx import Add, FloatImm, Mul

GELU = (-1.0000338603, -1.1507027834, -0.46032890027, -0.051449793689, 6.9232533632e-3, -4.5013839808e-4)
"""Coefficients of the polynomial for log2(P(-u)), by rising power of u."""
LARGE = 100.0
"""Bound of u: here P(-u) is 0 in float32 already, and infinity times 0 would be NaN."""
RELATIVE_ERROR, ABSOLUTE_ERROR = 2.0**-14, 2.0**-19
"""Bounds of the error, of which one holds for any x: an eighth of a unit in the last place of float16, or two millionths."""

_GELU_SOURCE = """
__device__ __forceinline__ float kd_quick_gelu(float x) {
  float positive, tail, u = fminf(fabsf(x), LARGEf);
#if __CUDA_ARCH__ < 800  // which has no max.NaN
  positive = x < 0.0f ? 0.0f : x;
#else
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(positive) : "f"(x), "f"(0.0f));
#endif
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


def with_fast_activations(expr: Any, dtype: str) -> Any:
    """Return an expression with fast gelu and silu in place of float32 ones, where its result is rounded to 16 bits."""
    return tvm_ffi.structural_map(expr, [(Mul, _fast_activation)], order="post") if dtype in ("float16", "bfloat16") else expr


def _fast_activation(expr: Any) -> Any:
    """Return a multiplication as a fast activation where it is gelu or silu, else unchanged."""
    for x, gate in ((expr.a, expr.b), (expr.b, expr.a)):
        if str(expr.ty.dtype) == "float32":
            if _is_call(gate, "tirx.sigmoid") and _same(gate.args[0], x):
                return tirx.cuda.func_call("kd_quick_silu", x, source_code=_silu(), return_type="float32")
            if _is_normal_distribution(gate, x):
                return tirx.cuda.func_call("kd_quick_gelu", x, source_code=_gelu(), return_type="float32")
    return expr


def _gelu() -> str:
    *lower, polynomial = [f"{coefficient:.9e}f" for coefficient in GELU]
    for coefficient in reversed(lower):
        polynomial = f"fmaf(u, {polynomial}, {coefficient})"
    return _GELU_SOURCE.replace("LARGE", str(LARGE)).replace("POLYNOMIAL", polynomial)


def _silu() -> str:
    return _SILU_SOURCE.replace("FACTOR", f"{-1 / math.log(2):.9e}")


def _is_normal_distribution(gate: Any, x: Any) -> bool:
    """Say whether an expression is 0.5 + erf(x * sqrt(0.5)) * 0.5."""
    erf = _other_operand(_other_operand(gate, Add, 0.5), Mul, 0.5)
    return _is_call(erf, "tirx.erf") and _same(_other_operand(erf.args[0], Mul, math.sqrt(0.5)), x)


def _other_operand(expr: Any, kind: type, constant: float) -> Any:
    """Return the other operand of an addition or multiplication (`kind`) by a constant; None for any other expression."""
    if isinstance(expr, kind):
        for one, other in ((expr.a, expr.b), (expr.b, expr.a)):  # type: ignore[attr-defined]
            if isinstance(one, FloatImm) and math.isclose(one.value, constant, rel_tol=1e-6):
                return other
    return None


def _is_call(expr: Any, name: str) -> bool:
    return isinstance(expr, Call) and getattr(expr.op, "name", "") == name


def _same(one: Any, other: Any) -> bool:
    return one is not None and bool(tvm_ffi.structural_equal(one, other))
