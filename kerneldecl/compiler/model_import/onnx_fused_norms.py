"""Owns the converters of norms that onnxruntime's optimiser fuses, and that are no operators of ONNX.

Knows nothing of files, nor of norms that ONNX has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

UNREGISTERED = frozenset({"SimplifiedLayerNormalization"})
"""Those that onnxruntime writes in ONNX's own domain, where onnx's checker does not know them."""


def simplified_layer_norm(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert SimplifiedLayerNormalization: an RMS norm of the last axis."""
    x, scale = inputs[:2]
    if int(attrs.get("axis", -1)) not in {-1, x.ty.ndim - 1}:
        raise NotImplementedError("its axis is not the last")
    if attrs["tvm_custom"]["num_outputs"] > 1:
        raise NotImplementedError("its statistics as a result")
    return builder.emit(op.nn.rms_norm(x, scale, axes=[-1], epsilon=_epsilon(attrs)))


def skip_simplified_layer_norm(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert com.microsoft's SkipSimplifiedLayerNormalization: the RMS norm of x + skip + bias, and this sum."""
    x, skip, scale, bias = [*inputs, None][:4]
    total = _sum(builder, x, skip, bias)
    return _results(builder.emit(op.nn.rms_norm(total, scale, axes=[-1], epsilon=_epsilon(attrs))), total, attrs)


def skip_layer_norm(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert com.microsoft's SkipLayerNormalization: the layer norm of x + skip + bias, and this sum."""
    x, skip, scale, shift, bias = [*inputs, None, None][:5]
    total = _sum(builder, x, skip, bias)
    if shift is None:
        shift = builder.emit(op.zeros_like(scale))
    return _results(builder.emit(op.nn.layer_norm(total, scale, shift, axes=[-1], epsilon=_epsilon(attrs))), total, attrs)


def _sum(builder: Any, x: Any, skip: Any, bias: Any) -> Any:
    total = builder.emit(op.add(x, skip))
    return total if bias is None else builder.emit(op.add(total, bias))


def _results(norm: Any, total: Any, attrs: Mapping[str, Any]) -> Any:
    """Return the norm, two statistics that onnxruntime has for training alone, and the sum."""
    return norm if attrs["tvm_custom"]["num_outputs"] == 1 else relax.Tuple([norm, norm, norm, total])


def _epsilon(attrs: Mapping[str, Any]) -> float:
    return float(attrs.get("epsilon", 1e-5))
