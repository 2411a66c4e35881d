"""Owns the converters of ONNX's QuantizeLinear and DequantizeLinear, by tensor, by axis and in blocks.

Knows nothing of operators that compute with quantized numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm.relax import op

from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.model_import.onnx_casts import cast, rounded_to
from kerneldecl.compiler.model_import.onnx_elementwise import is_float
from kerneldecl.compiler.model_import.onnx_types import STORED, type_name

_NARROW_RANGES = {"INT2": (-2, 1), "INT4": (-8, 7), "UINT2": (0, 3), "UINT4": (0, 15)}


def quantize_linear(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert QuantizeLinear: round(x / scale) + zero point, halves to even, saturated; a floating result is rounded once."""
    from onnx.helper import np_dtype_to_tensor_dtype, tensor_dtype_to_np_dtype

    x, scale, zero = [*inputs, None][:3]
    emit = builder.emit
    to = attrs.get("output_dtype") or np_dtype_to_tensor_dtype(numpy_dtype("uint8" if zero is None else dtype_of(zero)))
    dtype = str(tensor_dtype_to_np_dtype(attrs["precision"])) if attrs.get("precision") else dtype_of(scale)
    scale, zero = (_along(builder, each, x, attrs) for each in (scale, zero))
    ratio = emit(op.divide(emit(op.astype(x, dtype)), emit(op.astype(scale, dtype))))
    limits = _limits(to)
    if limits is None:
        return _floating(builder, ratio, zero, {**attrs, "to": to})
    name, (low, high) = type_name(to), limits
    # In float32, whatever the scale's: float16 does not have all zero points of 16 bits.
    shifted = emit(op.astype(emit(op.round(ratio)), "float32"))
    if zero is not None:
        shifted = emit(op.add(shifted, emit(op.astype(zero, "float32"))))
    inside = emit(op.clip(shifted, low, high))
    return emit(op.astype(inside, STORED.get(name, str(tensor_dtype_to_np_dtype(to)))))


def _floating(builder: Any, ratio: Any, zero: Any, attrs: Mapping[str, Any]) -> Any:
    """Return quotients as a floating type of few bits has them."""
    from onnx.helper import tensor_dtype_to_np_dtype

    if zero is not None:
        ratio = builder.emit(op.add(ratio, builder.emit(op.astype(zero, dtype_of(ratio)))))
    name = type_name(attrs["to"])
    if name in STORED:
        return rounded_to(builder, ratio, name, attrs)
    found = cast(builder, [ratio], attrs)
    return builder.emit(op.astype(ratio, str(tensor_dtype_to_np_dtype(attrs["to"])))) if found is None else found


def dequantize_linear(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert DequantizeLinear: (x - zero point) * scale, in the dtype of the result."""
    from onnx.helper import tensor_dtype_to_np_dtype

    x, scale, zero = [*inputs, None][:3]
    emit = builder.emit
    dtype = str(tensor_dtype_to_np_dtype(attrs["output_dtype"])) if attrs.get("output_dtype") else dtype_of(scale)
    scale, zero = (_along(builder, each, x, attrs) for each in (scale, zero))
    if zero is not None:
        exact = dtype if is_float(dtype_of(x)) else "int32"
        x = emit(op.subtract(emit(op.astype(x, exact)), emit(op.astype(zero, exact))))
    return emit(op.multiply(emit(op.astype(x, dtype)), emit(op.astype(scale, dtype))))


def _along(builder: Any, value: Any, x: Any, attrs: Mapping[str, Any]) -> Any:
    """Return a scale or zero point as it is broadcast over x: one number, one for each place of an axis, or one for each block of it."""
    if value is None or value.ty.ndim == 0:
        return value
    rank, block = x.ty.ndim, int(attrs.get("block_size", 0))
    axis = int(attrs.get("axis", 1)) % rank if rank > 1 else 0
    if not block:
        return builder.emit(op.reshape(value, [-1 if at == axis else 1 for at in range(rank)]))
    shape, blocks = static_shape(x), static_shape(value)
    if shape is None or blocks is None:
        raise NotImplementedError("blocks of a dynamic shape")
    whole = builder.emit(op.repeat(value, block, axis))
    if blocks[axis] * block == shape[axis]:
        return whole
    return builder.emit(op.strided_slice(whole, [axis], [0], [shape[axis]]))


def _limits(to: int) -> tuple[int, int] | None:
    """Return the range of an integer type of ONNX; None of a floating one."""
    from onnx.helper import tensor_dtype_to_np_dtype

    dtype = tensor_dtype_to_np_dtype(to)
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return _NARROW_RANGES.get(type_name(to))
