"""Owns the converters of ONNX operators that TVM's importer lacks or gets wrong, and that are no function of others.

Knows nothing of files, nor of recurrent operators' steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import array_of
from kerneldecl.compiler.graph.rewriting import dtype_of
from kerneldecl.compiler.model_import import (
    onnx_casts,
    onnx_elementwise,
    onnx_fused_norms,
    onnx_quantized,
    onnx_reductions,
    onnx_resize,
    onnx_shapes,
    onnx_training,
)
from kerneldecl.compiler.model_import.onnx_elementwise import text
from kerneldecl.compiler.model_import.onnx_recurrent import recurrent


def _one_hot(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert OneHot with a known depth; indices count from the end where negative, and give no hot value out of range."""
    indices, depth, values = inputs
    count = _number(depth)
    wide = builder.emit(op.astype(indices, "int64"))
    wide = builder.emit(op.where(op.less(wide, relax.const(0, "int64")), op.add(wide, relax.const(count, "int64")), wide))
    places = relax.op.arange(0, count, 1, "int64")
    rank = indices.ty.ndim
    axis = int(attrs.get("axis", -1)) % (rank + 1)
    along = op.reshape(places, [count if i == axis else 1 for i in range(rank + 1)])
    is_hot = builder.emit(op.equal(builder.emit(op.expand_dims(wide, axis)), builder.emit(along)))
    off, on = (builder.emit(op.take(values, relax.const(i, "int64"), axis=0)) for i in (0, 1))
    return builder.emit(op.where(is_hot, on, off))


_SORTED = {"bfloat16": "float32", "int16": "int32", "uint16": "int32", "uint32": "int64"}
_HALF = 1 << 63


def _top_k(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert TopK of dtypes that TVM does not sort: in one that has all of their values."""
    x, k = inputs
    dtype, emit = dtype_of(x), builder.emit
    if dtype not in {*_SORTED, "uint64"}:
        return None
    if array_of(k) is None:
        raise NotImplementedError("its k is no constant")
    # int64 has the order of uint64 with the highest bit flipped.
    flip = relax.const(np.uint64(_HALF), "uint64") if dtype == "uint64" else None
    wide = emit(op.astype(x if flip is None else emit(op.bitwise_xor(x, flip)), _SORTED.get(dtype, "int64")))
    axis, largest = int(attrs.get("axis", -1)), bool(attrs.get("largest", 1))
    both = emit(op.topk(wide, _number(k), axis, "both", largest, "int64"))
    values, indices = (emit(relax.TupleGetItem(both, at)) for at in (0, 1))
    narrow = emit(op.astype(values, dtype))
    return relax.Tuple([narrow if flip is None else emit(op.bitwise_xor(narrow, flip)), indices])


def _has_element(_: Any, inputs: Sequence[Any], __: Mapping[str, Any]) -> Any:
    """Convert OptionalHasElement without an input."""
    return None if any(each is not None for each in inputs) else relax.const(False, "bool")


def _number(expr: Any) -> int:
    value = getattr(expr, "value", None)
    if value is None:
        raise NotImplementedError("a size of its result is no constant")
    return int(value.numpy().item() if hasattr(value, "numpy") else value)


def _centered(builder: Any, x: Any, zero_point: Any, axis: int | None = None) -> Any:
    """Return x - zero_point in int32; a vector of zero points is along an axis."""
    wide = builder.emit(op.astype(x, "int32"))
    if zero_point is None:
        return wide
    zero = builder.emit(_along(builder.emit(op.astype(zero_point, "int32")), zero_point, x, axis))
    return builder.emit(op.subtract(wide, zero))


def _along(value: Any, vector: Any, x: Any, axis: int | None) -> Any:
    if vector.ty.ndim != 1 or axis is None:
        return value
    return op.reshape(value, [-1 if i == axis % x.ty.ndim else 1 for i in range(x.ty.ndim)])


def _requantized(builder: Any, sums: Any, scale: Any, zero_point: Any) -> Any:
    """Return round(sums * scale) + zero_point, halves to even, in the zero point's dtype and saturated."""
    dtype = str(zero_point.ty.dtype.dtype)
    low, high = (0, 255) if dtype == "uint8" else (-128, 127)
    emit = builder.emit
    rounded = emit(op.round(emit(op.multiply(emit(op.astype(sums, "float32")), scale))))
    shifted = emit(op.add(rounded, emit(op.astype(zero_point, "float32"))))
    return emit(op.astype(emit(op.clip(shifted, low, high)), dtype))


def _q_linear_matmul(builder: Any, inputs: Sequence[Any], _: Mapping[str, Any]) -> Any:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs
    sums = builder.emit(op.matmul(_centered(builder, a, a_zero, -2), _centered(builder, b, b_zero, -1), out_dtype="int32"))
    product = builder.emit(op.multiply(_along(a_scale, a_scale, a, -2), _along(b_scale, b_scale, b, -1)))
    scale = builder.emit(op.astype(builder.emit(op.divide(product, y_scale)), "float32"))
    return _requantized(builder, sums, scale, y_zero)


def _convolved(builder: Any, x: Any, w: Any, attrs: Mapping[str, Any]) -> Any:
    """Return the convolution of int32 images and weights."""
    spatial = x.ty.ndim - 2
    operators = {1: (op.nn.conv1d, "NCW", "OIW"), 2: (op.nn.conv2d, "NCHW", "OIHW"), 3: (op.nn.conv3d, "NCDHW", "OIDHW")}
    if text(attrs.get("auto_pad", "NOTSET")) not in {"NOTSET", "VALID"}:
        raise NotImplementedError("auto_pad; give pads")
    convolve, data_layout, kernel_layout = operators[spatial]
    window = {name: list(attrs.get(given, [1] * spatial)) for name, given in (("strides", "strides"), ("dilation", "dilations"))}
    padding, groups = list(attrs.get("pads", [0] * 2 * spatial)), int(attrs.get("group", 1))
    layouts = {"data_layout": data_layout, "kernel_layout": kernel_layout, "out_dtype": "int32"}
    return builder.emit(convolve(x, w, padding=padding, groups=groups, **window, **layouts))


def _conv_integer(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x, w, x_zero, w_zero = [*inputs, None, None][:4]
    return _convolved(builder, _centered(builder, x, x_zero), _centered(builder, w, w_zero, 0), attrs)


def _q_linear_conv(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = [*inputs, None][:9]
    sums = _convolved(builder, _centered(builder, x, x_zero), _centered(builder, w, w_zero, 0), attrs)
    if bias is not None:
        sums = builder.emit(op.add(sums, _along(bias, bias, x, 1)))
    product = builder.emit(op.multiply(x_scale, _along(w_scale, w_scale, x, 1)))
    scale = builder.emit(op.divide(product, y_scale))
    return _requantized(builder, sums, scale, y_zero)


def _non_max_suppression(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """Return NonMaxSuppression's inputs as TVM's converter wants them: constants, and a threshold that suppresses what reaches it."""
    boxes, scores, most, iou, score = [*inputs, *[None] * 3][:5]
    if any(each is not None and array_of(each) is None for each in (most, iou, score)):
        raise NotImplementedError("its limits are no constants")
    threshold = np.zeros((), "float32") if iou is None else array_of(iou)
    assert threshold is not None
    above = np.nextafter(threshold.astype("float32"), np.float32(np.inf))
    return [boxes, scores, most, relax.const(above, "float32"), score], attrs


def _conv_transpose(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    return list(inputs), onnx_shapes.conv_transpose_attrs(inputs, attrs)


def _unsqueeze(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """Return Unsqueeze's inputs with axes as a list: torch's exporter writes the one of its attention of grouped queries as a number."""
    data, *rest = inputs
    axes = array_of(rest[0]) if rest else None
    return [data, *(rest if axes is None else [relax.const(axes.reshape(-1), "int64")])], attrs


Converter = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]

OPERATORS: Mapping[str, Converter] = {
    "Adagrad": onnx_training.adagrad,
    "Adam": onnx_training.adam,
    "BitCast": onnx_casts.bit_cast,
    "ConvInteger": _conv_integer,
    "CumProd": onnx_reductions.cumulative_product,
    "LpNormalization": onnx_reductions.lp_normalization,
    "Momentum": onnx_training.momentum,
    "OneHot": _one_hot,
    "QLinearConv": _q_linear_conv,
    "QLinearMatMul": _q_linear_matmul,
    "ReverseSequence": onnx_shapes.reverse_sequence,
    "SimplifiedLayerNormalization": onnx_fused_norms.simplified_layer_norm,
    "SkipLayerNormalization": onnx_fused_norms.skip_layer_norm,
    "SkipSimplifiedLayerNormalization": onnx_fused_norms.skip_simplified_layer_norm,
    "Upsample": onnx_resize.upsample,
    **{kind: functools.partial(recurrent, kind) for kind in ("RNN", "GRU", "LSTM")},
}
"""Converters by operator."""

CORRECTED: Mapping[str, Converter] = {
    "BatchNormalization": onnx_reductions.batch_normalization,
    "BitShift": onnx_elementwise.shifted,
    "Cast": onnx_casts.cast,
    "CastLike": onnx_casts.cast_like,
    "ConstantOfShape": onnx_shapes.constant_of_shape,
    "DequantizeLinear": onnx_quantized.dequantize_linear,
    "Dropout": onnx_elementwise.dropout,
    "Expand": onnx_shapes.expand,
    "EyeLike": onnx_elementwise.eye_like,
    "IsInf": onnx_elementwise.is_infinite,
    "Mod": onnx_elementwise.remainder,
    "OptionalHasElement": _has_element,
    "Pow": onnx_elementwise.power,
    "QuantizeLinear": onnx_quantized.quantize_linear,
    "ReduceMax": onnx_reductions.reduce_max,
    "ReduceMin": onnx_reductions.reduce_min,
    "Resize": onnx_resize.resize,
    "SpaceToDepth": onnx_shapes.space_to_depth,
    "Split": onnx_shapes.split,
    "TopK": _top_k,
}
"""Converters of operators that TVM's importer has and gets wrong at times; None where its own is right."""

PREPARED: Mapping[str, Callable[[Sequence[Any], Mapping[str, Any]], tuple[list[Any], Mapping[str, Any]]]] = {
    "ConvTranspose": _conv_transpose,
    "NonMaxSuppression": _non_max_suppression,
    "Unsqueeze": _unsqueeze,
}
"""Inputs and attributes with which TVM's own converter is right."""
