"""Owns the converters of ONNX's reductions that TVM's importer gets wrong: extremes, statistics of a batch.

Knows nothing of files. Sums over nothing are a pass's matter (EmptyTensors).

Each returns None where TVM's own converter is right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from kerneldecl.compiler.graph.named_constants import array_of
from kerneldecl.compiler.graph.rewriting import dtype_of


def _extreme(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any], *, is_max: bool) -> Any:
    """Convert ReduceMax and ReduceMin.

    TVM's start at the largest finite number, so that the maximum of nothing but -inf, as of a masked row, would be -3e38. Of bools
    TVM has none.
    """
    data, axes = inputs[0], _axes(inputs, attrs)
    keep = bool(attrs.get("keepdims", 1))
    reduce, worst = (op.max, -math.inf) if is_max else (op.min, math.inf)
    if axes == []:
        return data
    dtype, emit = dtype_of(data), builder.emit
    if dtype == "bool":
        return emit(op.greater(emit(reduce(emit(op.astype(data, "int8")), axes, keep)), relax.const(0, "int8")))
    if not dtype.startswith(("float", "bfloat")):
        return emit(reduce(data, axes, keep))
    is_better = emit(op.not_equal(data, relax.const(worst, dtype)))
    any_better = emit(op.astype(emit(op.max(emit(op.astype(is_better, "int8")), axes, keep)), "bool"))
    return emit(op.where(any_better, emit(reduce(data, axes, keep)), relax.const(worst, dtype)))


reduce_max, reduce_min = (functools.partial(_extreme, is_max=is_max) for is_max in (True, False))


def _axes(inputs: Sequence[Any], attrs: Mapping[str, Any]) -> list[int] | None:
    """Return the axes that are reduced, None for all; they are an attribute or, from opset 18 on, an input."""
    given = [*inputs, None][1]
    if given is None:
        axes = list(attrs.get("axes", ()))
    elif (known := array_of(given)) is not None:
        axes = [int(axis) for axis in known]
    else:
        raise NotImplementedError("its axes are no constant")
    return axes or ([] if attrs.get("noop_with_empty_axes") else None)


def batch_normalization(builder: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Any:
    """Convert BatchNormalization in training mode: Y of the batch's statistics, and running ones, to which momentum gives their share."""
    if not attrs.get("training_mode"):
        return None
    x, scale, bias, *running = inputs
    emit, momentum = builder.emit, float(attrs.get("momentum", 0.9))
    axes = [axis for axis in range(x.ty.ndim) if axis != 1]
    batch = [emit(reduce(x, axes)) for reduce in (op.mean, op.variance)]
    mean, variance, scale, bias = (emit(op.expand_dims(each, [axis - 1 for axis in axes[1:]])) for each in (*batch, scale, bias))
    deviation = emit(op.sqrt(emit(op.add(variance, relax.const(float(attrs.get("epsilon", 1e-5)), dtype_of(x))))))
    normal = emit(op.divide(emit(op.subtract(x, mean)), deviation))
    y = emit(op.add(emit(op.multiply(normal, scale)), bias))

    def moved(old: Any, new: Any) -> Any:
        shares = [emit(op.multiply(each, relax.const(share, dtype_of(each)))) for each, share in ((old, momentum), (new, 1 - momentum))]
        return emit(op.add(*shares))

    return relax.Tuple([y, *(moved(old, new) for old, new in zip(running, batch, strict=True))])
