"""Owns the pass that folds batch norms of inference into the convolutions before them, or makes them a scale and a shift.

Knows nothing of layouts: it is for convolutions as they were imported, whose weights are [out, in, …], or [in, out, …] of transposed ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import relax

from kerneldecl.compiler.graph.named_constants import array_of, constant, name_of
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape

_CONVOLUTIONS = {
    "relax.nn.conv1d": ("NCW", "OIW"),
    "relax.nn.conv2d": ("NCHW", "OIHW"),
    "relax.nn.conv3d": ("NCDHW", "OIDHW"),
    "relax.nn.conv1d_transpose": ("NCW", "IOW"),
    "relax.nn.conv2d_transpose": ("NCHW", "IOHW"),
}
"""The layouts of data and weights in which output channels are axis 1 of the result, and of the weights axis 0, or 1 of transposed ones."""


@dataclass(frozen=True)
class _Affine:
    """What a batch norm does to each channel: x * scale + shift, in float64 until it is rounded once."""

    scale: np.ndarray[Any, Any]
    shift: np.ndarray[Any, Any]


@graph_pass
class FoldBatchNorm(Rewriter):
    """Folds batch norms of constant statistics into the weights and bias of the convolution before them.

    A batch norm after anything else becomes a multiplication and an addition of a constant for each channel. One in training mode, whose
    statistics are those of its input or whose running statistics are used, stays.

    TVM's FoldBatchnormToConv2D leaves an addition of its own beside a bias, computes in float32 alone and takes no batch norm by itself.
    """

    def visit_tuple_getitem_(self, item: relax.TupleGetItem) -> relax.Expr:
        item = super().visit_tuple_getitem_(item)
        norm = self.producer(item.tuple_value, "relax.nn.batch_norm")
        if item.index != 0 or norm is None or norm.attrs.training:
            return item
        affine = _affine(norm)
        return item if affine is None else self._folded(norm, affine)

    def _folded(self, norm: relax.Call, affine: _Affine) -> relax.Expr:
        data, axis = norm.args[0], int(norm.attrs.axis)
        sum_ = self.producer(data, "relax.add")
        bias = _channel_constant(sum_) if sum_ is not None and self.is_read_once(data) else None
        before = sum_.args[0] if sum_ is not None and bias is not None else data
        cast = self.producer(before, "relax.astype")  # half precision: the accumulators are float32
        accumulators = before if cast is None else cast.args[0]
        conv = self._convolution(accumulators)
        dtype = dtype_of(data)
        if conv is None or axis != 1 or not (self.is_read_once(before) and self.is_read_once(accumulators)):
            scaled = relax.op.multiply(data, _along(affine.scale, data, axis, dtype))
            return relax.op.add(scaled, _along(affine.shift, data, axis, dtype))
        weights = conv.args[1].value.numpy()
        scale = affine.scale.reshape(-1, *[1] * (weights.ndim - 1 - conv.attrs.kernel_layout.index("O")))
        folded = constant(weights.astype("float64") * scale, dtype_of(conv.args[1]), name_of(conv.args[1]))
        shift = affine.shift if bias is None else affine.shift + bias.astype("float64").reshape(-1) * affine.scale
        scaled = relax.Call(conv.op, [conv.args[0], folded], conv.attrs)
        if cast is not None:
            scaled = relax.op.astype(self.builder_.emit(scaled), dtype)
        return relax.op.add(scaled, _along(shift, data, axis, dtype))

    def _convolution(self, value: relax.Expr) -> relax.Call | None:
        for operator, layouts in _CONVOLUTIONS.items():
            conv = self.producer(value, operator)
            if (
                conv is not None
                and (conv.attrs.data_layout, conv.attrs.kernel_layout) == layouts
                and isinstance(conv.args[1], tvm.ir.GenericConst)
                and (layouts[1][0] == "O" or int(conv.attrs.groups) == 1)  # groups repeat the axis of output channels
            ):
                return conv
        return None


def _affine(norm: relax.Call) -> _Affine | None:
    """Return the scale and shift of a batch norm; None where its parameters are no constants."""
    arrays = [array_of(arg) for arg in norm.args[1:]]
    if any(array is None for array in arrays) or len(arrays) != 4:
        return None
    gamma, beta, mean, variance = (array.astype("float64") for array in arrays if array is not None)
    scale = (gamma if norm.attrs.scale else 1.0) / np.sqrt(variance + norm.attrs.epsilon)
    return _Affine(scale, (beta if norm.attrs.center else 0.0) - mean * scale)


def _channel_constant(call: relax.Call) -> np.ndarray[Any, Any] | None:
    """Return the constant that an addition adds to each channel of axis 1; None for another addition."""
    shape, value = static_shape(call), array_of(call.args[1])
    if shape is None or value is None or value.shape not in {(shape[1], *[1] * (len(shape) - 2)), (1, shape[1], *[1] * (len(shape) - 2))}:
        return None
    return value


def _along(values: np.ndarray[Any, Any], data: relax.Expr, axis: int, dtype: str) -> tvm.ir.GenericConst:
    """Return a value for each channel as a constant that broadcasts along the other axes of the data."""
    extents = [1] * int(data.ty.ndim)
    extents[axis] = -1
    return constant(values.reshape(extents), dtype)
