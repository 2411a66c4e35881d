"""Owns the converter of torch's scaled dot product attention: two GEMMs, a scale, a mask and a softmax, each written once.

Knows nothing of files, nor of kernels.

torch's own decomposition computes half-precision attention in float32, GEMMs included, and guards each row against masks of -inf
alone. Here GEMMs have half-precision operands and float32 accumulators, scores are scaled in float32 and stored in half precision,
and rows are guarded where a mask is not known.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from tvm import relax

from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler.model_import.torch_contractions import HALF, dtype_of, matmul

_MASKED = {"float16": -65504.0}
"""What is added to masked scores, by dtype: exp gives 0, and a row of it alone has no NaN."""
_WIDE_MASKED = -1e30


def attention(node: Any, importer: Any) -> Any:
    """Convert softmax(q k^T * scale + mask) v."""
    emit = importer.block_builder.emit
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), importer.retrieve_args(node), strict=False))
    given |= {name: importer.env.get(value, value) if hasattr(value, "op") else value for name, value in node.kwargs.items()}
    if given.get("dropout_p"):
        raise NotImplementedError("attention with dropout; export the model after .eval()")
    q, k, v = given["query"], given["key"], given["value"]
    if given.get("enable_gqa"):
        k, v = (_repeated(importer, x, q) for x in (k, v))
    dtype, rank = dtype_of(q), q.ty.ndim
    wide = "float32" if dtype in HALF else dtype
    transposed = emit(relax.op.permute_dims(k, [*range(rank - 2), rank - 1, rank - 2]))
    scale = given.get("scale") or 1 / math.sqrt(int(q.ty.shape[-1]))
    scores = emit(relax.op.multiply(emit(relax.op.matmul(q, transposed, out_dtype=wide)), relax.const(scale, wide)))
    scores = emit(relax.op.astype(scores, dtype)) if dtype != wide else scores
    mask = _causal(q, k) if given.get("is_causal") else given.get("attn_mask")
    if mask is None:
        return matmul(importer, emit(relax.op.nn.softmax(scores)), v)
    added, visible = _added(importer, mask, dtype)
    result = matmul(importer, emit(relax.op.nn.softmax(emit(relax.op.add(scores, added)))), v)
    return result if visible is None else emit(relax.op.where(visible, result, relax.const(0, dtype)))


def _repeated(importer: Any, x: Any, q: Any) -> Any:
    """Return keys or values with as many heads as there are queries' heads, as a view that GEMMs read without a copy."""
    emit, count, axis = importer.block_builder.emit, int(q.ty.shape[-3]) // int(x.ty.shape[-3]), x.ty.ndim - 3
    if count == 1:
        return x
    *batch, heads, rows, columns = x.ty.shape
    grouped = emit(relax.op.broadcast_to(emit(relax.op.expand_dims(x, axis + 1)), [*batch, heads, count, rows, columns]))
    return emit(relax.op.reshape(grouped, [*batch, heads * count, rows, columns]))


def _causal(q: Any, k: Any) -> Any:
    """Return the mask of what a row may see: the columns up to its own."""
    rows, columns = q.ty.shape[-2], k.ty.shape[-2]
    if isinstance(rows, int) or hasattr(rows, "value"):
        return relax.const(np.tril(np.ones((int(rows), int(columns)), "bool")))
    ones = relax.op.full((rows, columns), relax.const(1, "int8"), "int8")
    return relax.op.astype(relax.op.tril(ones), "bool")


def _added(importer: Any, mask: Any, dtype: str) -> tuple[Any, Any]:
    """Return what is added to the scores for a mask, and which rows see anything; None for the latter if all are known to do."""
    emit, masked = importer.block_builder.emit, _MASKED.get(dtype, _WIDE_MASKED)
    if isinstance(mask, tvm.ir.GenericConst):
        array = mask.value.numpy()
        values = np.where(array, 0.0, -np.inf) if array.dtype == bool else array.astype("float32")
        seen = (values > -np.inf).any(axis=-1, keepdims=True)
        return relax.const(np.maximum(values, masked).astype(numpy_dtype(dtype)), dtype), None if seen.all() else relax.const(seen)
    if dtype_of(mask) == "bool":
        seen = emit(relax.op.max(emit(relax.op.astype(mask, "int8")), [mask.ty.ndim - 1], keepdims=True))
        added = emit(relax.op.where(mask, relax.const(0, dtype), relax.const(masked, dtype)))
        return added, emit(relax.op.astype(seen, "bool"))
    highest = emit(relax.op.max(mask, [mask.ty.ndim - 1], keepdims=True))
    seen = emit(relax.op.greater(highest, relax.const(-math.inf, dtype_of(mask))))
    return emit(relax.op.maximum(emit(relax.op.astype(mask, dtype)), relax.const(masked, dtype))), seen
