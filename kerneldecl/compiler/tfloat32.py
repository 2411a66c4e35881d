"""Owns how TensorIR, which has no dtype for it, says that a float32 is read as TF32: the lower 13 bits of its mantissa do not count.

Knows nothing of products, schedules or instructions. Tensor cores read float32 like that, whatever the lower bits are (PTX ISA,
wgmma.mma_async on .tf32); other units compute what is written here.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.ir.prim.expr import BitwiseAnd

NAME = "tfloat32"
"""In the place of the dtype of what is read so."""
MASK = 0xFFFFE000
"""Sign, 8 bits of the exponent, 10 of the mantissa. Infinity stays, and so do the NaN that arithmetic makes."""


def truncated(value: Any) -> Any:
    """Return an expression of float32 without the digits that TF32 does not have."""
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
    """Return what is taken for another dtype bit by bit."""
    is_it = getattr(getattr(expr, "op", None), "name", "") == "tirx.reinterpret" and str(expr.ty.dtype) == dtype
    return expr.args[0] if is_it else None
