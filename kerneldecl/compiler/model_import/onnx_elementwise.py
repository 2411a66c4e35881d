"""Owns the converters of ONNX's elementwise operators that TVM's importer gets wrong: shifts, powers, remainders.

Knows nothing of files, nor of operators that read more than one element.

Each returns None where TVM's own converter is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.rewriting import dtype_of

_EXPONENT_BITS = 6
"""Bits of an integer power's exponent: larger ones overflow 64 bits, but for bases of which the lowest bit decides."""


def shifted(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert BitShift: a count of the width or more, or below 0, leaves the sign of a signed number that goes right, and else 0."""
    x, count = inputs
    dtype = dtype_of(x)
    last = relax.const(np.dtype(dtype).itemsize * 8 - 1, dtype)
    shift = op.left_shift if text(attrs["direction"]) == "LEFT" else op.right_shift
    is_signed = not dtype.startswith("uint")
    emit = builder.emit
    none_left = emit(op.right_shift(x, last)) if shift is op.right_shift and is_signed else relax.const(0, dtype)
    is_beyond = emit(op.greater(count, last))
    if is_signed:
        is_beyond = emit(op.logical_or(is_beyond, emit(op.less(count, relax.const(0, dtype)))))
    # TVM's shifts are those of C: no count may be beyond the width, whoever reads the result.
    return emit(op.where(is_beyond, none_left, emit(shift(x, emit(op.where(is_beyond, relax.const(0, dtype), count))))))


def power(builder: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    """Convert Pow of integers, or of two dtypes: the result has the base's."""
    base, exponent = inputs
    dtype, other = dtype_of(base), dtype_of(exponent)
    emit = builder.emit
    if is_float(dtype):
        return None if dtype == other else emit(op.power(base, emit(op.astype(exponent, dtype))))
    if is_float(other):
        wide = [emit(op.astype(each, "float64")) for each in (base, exponent)]
        return emit(op.astype(emit(op.power(*wide)), dtype))
    return _integer_power(builder, base, exponent if dtype == other else emit(op.astype(exponent, dtype)), dtype)


def _integer_power(builder: Any, base: Any, exponent: Any, dtype: str) -> Any:
    """Return a power by squaring; below 0 an exponent leaves 1 and -1 alone, as any other base's power is a fraction."""
    emit, zero, one = builder.emit, relax.const(0, dtype), relax.const(1, dtype)
    count = exponent if dtype.startswith("uint") else emit(op.abs(exponent))
    square, product = base, emit(op.where(emit(op.equal(base, base)), one, one))
    for bit in range(_EXPONENT_BITS):
        is_set = emit(op.equal(emit(op.bitwise_and(emit(op.right_shift(count, relax.const(bit, dtype))), one)), one))
        product = emit(op.where(is_set, emit(op.multiply(product, square)), product))
        square = emit(op.multiply(square, square))
    if dtype.startswith("uint"):
        return product
    is_fraction = emit(op.logical_and(emit(op.less(exponent, zero)), emit(op.not_equal(emit(op.abs(base)), one))))
    return emit(op.where(is_fraction, zero, product))


def remainder(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert Mod of floating point without fmod: the remainder has the divisor's sign, as Python's has, also where it is 0."""
    x, divisor = inputs
    dtype = dtype_of(x)
    if attrs.get("fmod") or not is_float(dtype):
        return None
    emit, zero = builder.emit, relax.const(0.0, dtype)
    is_below = emit(op.less(divisor, zero))
    rest = emit(op.mod(x, divisor))
    is_other_sign = emit(op.not_equal(emit(op.less(rest, zero)), is_below))
    signed_zero = emit(op.where(is_below, relax.const(-0.0, dtype), zero))
    moved = emit(op.where(is_other_sign, emit(op.add(rest, divisor)), rest))
    return emit(op.where(emit(op.equal(rest, zero)), signed_zero, moved))


def is_infinite(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert IsInf of one sign alone."""
    signs = (attrs.get("detect_positive", 1), attrs.get("detect_negative", 1))
    if all(signs):
        return None
    if not any(signs):
        return builder.emit(op.logical_and(builder.emit(op.isinf(inputs[0])), relax.const(False, "bool")))
    return builder.emit(op.equal(inputs[0], relax.const(float("inf") if signs[0] else float("-inf"), dtype_of(inputs[0]))))


def dropout(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert Dropout, which drops nothing in inference: the data, and a mask that is true."""
    x, ratio, is_training = [*inputs, None, None][:3]
    if is_training is not None and not (_is_zero(is_training) or (ratio is not None and _is_zero(ratio))):
        raise NotImplementedError("it is in training mode, which draws random numbers")
    if attrs["tvm_custom"]["num_outputs"] == 1:
        return x
    return relax.Tuple([x, builder.emit(op.ones_like(x, "bool"))])


def _is_zero(value: Any) -> bool:
    return hasattr(value, "value") and not np.any(value.value.numpy())


def eye_like(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert EyeLike of a dtype other than its input's."""
    from onnx.helper import tensor_dtype_to_np_dtype

    if "dtype" not in attrs:
        return None
    ones = builder.emit(op.eye_like(inputs[0], int(attrs.get("k", 0))))  # TVM gives it the input's dtype, whatever dtype is asked for
    return builder.emit(op.astype(ones, str(tensor_dtype_to_np_dtype(attrs["dtype"]))))


def text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))
