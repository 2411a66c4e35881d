"""Owns conversions from and to float8 on CPUs, as ml_dtypes and GPUs define them.

Knows nothing of schedules or of what is computed. TVM 0.27's own are wrong for zero, subnormal numbers, infinity and NaN.

A float8's exponent and mantissa, shifted to those of float32, give the value times a constant power of two.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.ir import TensorLoad
from tvm.tirx import BufferStore, Cast
from tvm_ffi import structural


class Format(NamedTuple):
    """An 8-bit floating-point format."""

    mantissa: int
    """Number of mantissa bits."""
    bias: int
    """Bias of the exponent."""
    special: int
    """The least magnitude, as bits, that is infinity or NaN."""
    has_infinity: bool
    nan: int


FORMATS = {
    "float8_e4m3fn": Format(3, 7, 0x7F, has_infinity=False, nan=0x7F),
    "float8_e5m2": Format(2, 15, 0x7C, has_infinity=True, nan=0x7E),
}
MANTISSA, BIAS, INFINITY = 23, 127, 0x7F800000
"""Mantissa bits, exponent bias and infinity of float32."""


def exact_float8(mod: tvm.IRModule) -> tvm.IRModule:
    """Return functions for CPUs whose casts from and to float8 are integer and float32 arithmetic."""
    return tvm.IRModule({name: _exact(func) for name, func in mod.functions.items()}, attrs=mod.attrs)


def _exact(func: Any) -> Any:
    """Return a function that reads its float8 arguments as float32, and rounds what it writes to them.

    In between, TVM computes in float32 what it calls float8, and its intermediate arrays hold float32.
    """
    target = (func.attrs or {}).get("target")
    params = {param for param in func.params if str(getattr(param.ty, "dtype", "")) in FORMATS}
    if not params or target is None or target.kind.name != "llvm":
        return func

    def load(node: Any) -> Any:
        dtype = str(node.ty.dtype)
        return Cast(dtype, _widened(node, FORMATS[dtype])) if node.source in params else node

    def store(node: Any) -> Any:
        if node.buffer not in params:
            return node
        dtype = str(node.value.ty.dtype)
        wide = node.value.value if isinstance(node.value, Cast) else node.value
        narrowed = _narrowed(_as("float32", wide), FORMATS[dtype])
        return BufferStore(node.buffer, _bits(dtype, narrowed), node.indices)

    def cast(node: Any) -> Any:
        inner = node.value
        is_there_and_back = isinstance(inner, Cast) and str(inner.ty.dtype) in FORMATS and str(inner.value.ty.dtype) == "float32"
        return _as(str(node.ty.dtype), inner.value) if is_there_and_back else node

    return func.with_body(structural.structural_map(func.body, [(TensorLoad, load), (BufferStore, store), (Cast, cast)]))


def _as(dtype: str, value: Any) -> Any:
    return value if str(value.ty.dtype) == dtype else Cast(dtype, value)


def _bits(dtype: str, value: Any) -> Any:
    return tirx.reinterpret(dtype, value)


def _u32(value: int) -> Any:
    return tirx.const(value, "uint32")


def _widened(value: Any, of: Format) -> Any:
    """Return a float8 as float32, which represents every float8 exactly."""
    bits = _as("uint32", _bits("uint8", value))
    shift = _u32(MANTISSA - of.mantissa)
    magnitude = bits & _u32(0x7F)
    finite = _bits("float32", magnitude << shift) * tirx.const(2.0 ** (BIAS - of.bias), "float32")
    special = (magnitude << shift) | _u32(INFINITY)
    sized = tirx.Select(magnitude >= _u32(of.special), special, _bits("uint32", finite))
    return _bits("float32", sized | ((bits & _u32(0x80)) << _u32(24)))


def _narrowed(value: Any, of: Format) -> Any:
    """Return the bits of a float32 rounded to the nearest float8, ties to even."""
    bits = _bits("uint32", value)
    size = bits & _u32(0x7FFFFFFF)
    shift = MANTISSA - of.mantissa
    odd = (size >> _u32(shift)) & _u32(1)
    rounded = (size + _u32((1 << (shift - 1)) - 1) + odd) >> _u32(shift)
    normal = rounded - _u32((BIAS - of.bias) << of.mantissa)
    # Adding this rounds a subnormal number to its last place.
    rounder = tirx.const(2.0 ** (MANTISSA + 1 - of.bias - of.mantissa), "float32")
    subnormal = _bits("uint32", _bits("float32", size) + rounder) - _bits("uint32", rounder)
    least_normal = _u32((BIAS + 1 - of.bias) << MANTISSA)
    finite = tirx.Select(size < least_normal, subnormal, normal)
    over = _u32(of.special if of.has_infinity else of.nan)
    found = tirx.Select(tirx.any(size >= _u32(INFINITY), finite > over), over, finite)
    sized = tirx.Select(size > _u32(INFINITY), _u32(of.nan), found)
    return _as("uint8", sized | ((bits >> _u32(24)) & _u32(0x80)))
