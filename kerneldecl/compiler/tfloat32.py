"""Owns TF32 in TensorIR, which has no dtype for it: a float32 operand whose lower 13 mantissa bits are masked out.

Knows nothing of GEMMs, schedules or instructions. Tensor cores ignore the lower bits of a .tf32 operand (PTX ISA,
wgmma.mma_async on .tf32); other units compute the mask.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir.prim.expr import BitwiseAnd

NAME = "tfloat32"
"""The dtype that an access has in an iteration space where float32 is read as TF32."""
MASK = 0xFFFFE000
"""Mask of the sign, 8 exponent bits and 10 mantissa bits. It keeps infinity and the NaN that arithmetic produces."""


def truncated(value: Any) -> Any:
    """Return a float32 expression truncated to the mantissa bits of TF32."""
    return tirx.reinterpret("float32", tirx.reinterpret("uint32", value) & tirx.const(MASK, "uint32"))


def read_by(expr: Any) -> Any | None:
    """Return the expression that this one truncates; None where it does something else."""
    masked = _reinterpreted(expr, "float32")
    match masked:
        case BitwiseAnd(a=bits, b=tirx.IntImm(value=mask)) if int(mask) == MASK:
            value = _reinterpreted(bits, "uint32")
            return value if value is not None and str(value.ty.dtype) == "float32" else None
        case _:
            return None


def _reinterpreted(expr: Any, dtype: str) -> Any | None:
    """Return the operand of a reinterpret cast to a dtype; None for any other expression."""
    is_cast = getattr(getattr(expr, "op", None), "name", "") == "tirx.reinterpret" and str(expr.ty.dtype) == dtype
    return expr.args[0] if is_cast else None
