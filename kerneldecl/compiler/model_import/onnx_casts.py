"""Owns the converters of ONNX's casts that TVM's importer gets wrong or lacks: to float8, to what wider dtypes hold, of bits.

Knows nothing of which dtype holds which numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, te
from tvm.relax import op

from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler.graph.rewriting import dtype_of
from kerneldecl.compiler.model_import.onnx_elementwise import is_float, text
from kerneldecl.compiler.model_import.onnx_types import STORED, type_name

_LARGEST_FLOAT8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@dataclass(frozen=True)
class _Format:
    """A floating format without infinity."""

    mantissa_bits: int
    """Stored ones."""
    lowest_exponent: int
    """Of the smallest normal number."""
    largest: float
    is_fnuz: bool = False
    """It has NaN, and no negative zero."""


_FORMATS = {
    "FLOAT4E2M1": _Format(1, 0, 6.0),
    "FLOAT6E2M3": _Format(3, 0, 7.5),
    "FLOAT6E3M2": _Format(2, -2, 28.0),
    "FLOAT8E4M3FNUZ": _Format(3, -7, 240.0, is_fnuz=True),
    "FLOAT8E5M2FNUZ": _Format(2, -15, 57344.0, is_fnuz=True),
}
_INTEGERS = {"INT2": (2, True), "INT4": (4, True), "UINT2": (2, False), "UINT4": (4, False)}
"""Bits of an integer, and whether it has a sign."""
_E8M0 = (2.0**-127, 2.0**127)
"""The smallest and the largest of the powers of 2 that are all of FLOAT8E8M0."""


def cast(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert Cast to float8, which by default gives the largest number for whatever is beyond it, and to what is held in wider dtypes."""
    from onnx.helper import tensor_dtype_to_np_dtype

    to = type_name(attrs["to"])
    if to in STORED:
        return rounded_to(builder, inputs[0], to, attrs)
    return _saturated(builder, inputs[0], str(tensor_dtype_to_np_dtype(attrs["to"])), attrs)


def cast_like(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert CastLike as Cast."""
    return _saturated(builder, inputs[0], dtype_of(inputs[1]), attrs) if isinstance(inputs[1].ty, relax.TensorType) else None


def bit_cast(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert BitCast between dtypes of one width."""
    from onnx.helper import tensor_dtype_to_np_dtype

    x, to = inputs[0], str(tensor_dtype_to_np_dtype(attrs["to"]))
    if type_name(attrs["to"]) in STORED or "bool" in {to, dtype_of(x)}:
        x = builder.emit(op.astype(x, "uint8")) if dtype_of(x) == "bool" and to in {"int8", "uint8"} else None
    if x is None or numpy_dtype(dtype_of(x)).itemsize != numpy_dtype(to).itemsize:
        raise NotImplementedError(f"{dtype_of(inputs[0])} as {type_name(attrs['to'])}")

    def reinterpreted(source: Any) -> Any:
        return te.compute(source.shape, lambda *at: tvm.tirx.reinterpret(to, source[at]), name="bit_cast")

    return x if dtype_of(x) == to else builder.emit_te(reinterpreted, x, primfunc_name_hint="bit_cast")


def rounded_to(builder: Any, x: Any, to: str, attrs: Mapping[str, Any]) -> Any:
    """Return values as one of STORED's types has them, in the dtype that holds it; `attrs` are those of Cast."""
    if not isinstance(x.ty, relax.TensorType):
        raise NotImplementedError(f"a shape as {to}")
    if to in _INTEGERS:
        found = _wrapped(builder, x, *_INTEGERS[to])
    else:
        wide = "float64" if dtype_of(x) == "float64" else "float32"
        value = builder.emit(op.astype(x, wide))
        found = _power_of_two(builder, value, attrs) if to == "FLOAT8E8M0" else _rounded(builder, value, _FORMATS[to], attrs)
    return builder.emit(op.astype(found, STORED[to]))


def _wrapped(builder: Any, x: Any, bits: int, is_signed: bool) -> Any:
    """Return the low bits of whole numbers; ONNX leaves open what becomes of floating ones out of range."""
    emit = builder.emit
    low = emit(op.bitwise_and(emit(op.astype(x, "int32")), relax.const(2**bits - 1, "int32")))
    if not is_signed:
        return low
    below = emit(op.subtract(low, relax.const(2**bits, "int32")))
    return emit(op.where(emit(op.less(low, relax.const(2 ** (bits - 1), "int32"))), low, below))


def _rounded(builder: Any, x: Any, to: _Format, attrs: Mapping[str, Any]) -> Any:
    """Return x rounded to the nearest number of a format, ties to even.

    A logarithm that is off by rounding moves an exponent only beside a power of 2, to which x is rounded by either.
    """
    emit, number = builder.emit, _number_of(x)
    exponent = emit(op.floor(emit(op.divide(emit(op.log(emit(op.abs(x)))), number(math.log(2.0))))))
    bounded = emit(op.minimum(emit(op.maximum(exponent, number(to.lowest_exponent))), number(math.floor(math.log2(to.largest)))))
    step = emit(op.power(number(2.0), emit(op.subtract(bounded, number(to.mantissa_bits)))))
    near = emit(op.multiply(emit(op.round(emit(op.divide(x, step)))), step))
    is_above, is_below = emit(op.greater(near, number(to.largest))), emit(op.less(near, number(-to.largest)))
    if to.is_fnuz and not attrs.get("saturate", 1):
        found = emit(op.where(emit(op.logical_or(is_above, is_below)), number(math.nan), near))
    else:
        found = emit(op.where(is_above, number(to.largest), emit(op.where(is_below, number(-to.largest), near))))
    is_zero = emit(op.equal(found, number(0.0))) if to.is_fnuz else emit(op.isnan(found))
    return emit(op.where(is_zero, number(0.0), found))


def _power_of_two(builder: Any, x: Any, attrs: Mapping[str, Any]) -> Any:
    """Return x rounded to a power of 2; 0 becomes the smallest one, and nothing says what a negative number becomes."""
    emit, number = builder.emit, _number_of(x)
    smallest, largest = map(number, _E8M0)
    half, two = number(0.5), number(2.0)
    inside = emit(op.where(emit(op.less(x, smallest)), smallest, emit(op.where(emit(op.greater(x, largest)), largest, x))))
    near = emit(op.power(two, emit(op.round(emit(op.divide(emit(op.log(inside)), number(math.log(2.0))))))))
    below = emit(op.where(emit(op.greater(near, inside)), emit(op.multiply(near, half)), near))
    mode = text(attrs.get("round_mode", "up"))
    limit = emit(op.multiply(below, number({"up": 1.0, "nearest": 1.5, "down": math.inf}[mode])))
    is_moved = (op.greater if mode == "up" else op.greater_equal)(inside, limit)
    found = emit(op.where(emit(is_moved), emit(op.multiply(below, two)), below))
    if attrs.get("saturate", 1):
        return found
    is_beyond = emit(op.logical_or(emit(op.greater(x, largest)), emit(op.less(x, smallest))))
    return emit(op.where(is_beyond, number(math.nan), found))


def _number_of(x: Any) -> Callable[[float], Any]:
    dtype = dtype_of(x)
    return lambda value: relax.const(float(value), dtype)


def _saturated(builder: Any, x: Any, to: str, attrs: Mapping[str, Any]) -> Any:
    if to not in _LARGEST_FLOAT8 or not attrs.get("saturate", 1) or not is_float(dtype_of(x)):
        return None
    emit, limit = builder.emit, _LARGEST_FLOAT8[to]
    highest, lowest = (relax.const(sign * limit, dtype_of(x)) for sign in (1.0, -1.0))
    # Not minimum and maximum: NaN stays NaN.
    below = emit(op.where(emit(op.greater(x, highest)), highest, x))
    return emit(op.astype(emit(op.where(emit(op.less(below, lowest)), lowest, below)), to))
