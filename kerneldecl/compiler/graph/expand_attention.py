"""Owns the pass that writes Relax's own attention operators as products, softmax and a mask, from which rules are recognised.

Knows nothing of rules.
"""

from __future__ import annotations

import math

import numpy as np
from tvm import relax
from tvm.relax import op

from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape

_MASKED = {"float16": -65504.0}
"""What is added to masked scores, by dtype."""
_WIDE_MASKED = -1e30


@graph_pass
class ExpandAttention(Rewriter):
    """Writes relax.nn.attention and attention_bias as two matmuls with a scale, a mask and a softmax between.

    TVM lowers them to one function that no schedule does well. Shapes must be known; others stay, and so do windows,
    which TVM does not define.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        is_attention = operator in {"relax.nn.attention", "relax.nn.attention_bias"}
        if not is_attention or any(static_shape(each) is None for each in call.args) or call.attrs.window_size is not None:
            return call
        q, k, v, *bias = call.args
        (_, queries, _, size), keys = static_shape(q) or (), (static_shape(k) or ())[1]
        dtype = dtype_of(q)
        heads_first = (0, 2, 1, 3)
        by_heads = [self.emitted(op.permute_dims(each, order)) for each, order in ((q, heads_first), (k, (0, 2, 3, 1)), (v, heads_first))]
        scale = 1 / math.sqrt(size) if call.attrs.scale is None else float(call.attrs.scale)
        product = self.emitted(op.matmul(by_heads[0], by_heads[1], out_dtype="float32" if dtype != "float64" else dtype))
        scores = self.emitted(op.multiply(product, relax.const(scale, dtype_of(product))))
        scores = self.emitted(op.astype(scores, dtype)) if dtype_of(scores) != dtype else scores
        for mask in (*bias, *_causal(call, queries, keys, dtype)):
            scores = self.emitted(op.add(scores, mask))
        context = self.emitted(op.matmul(self.emitted(op.nn.softmax(scores)), by_heads[2], out_dtype=dtype_of(product)))
        context = self.emitted(op.astype(context, dtype)) if dtype_of(context) != dtype else context
        return op.permute_dims(context, heads_first)


def _causal(call: relax.Call, queries: int, keys: int, dtype: str) -> list[relax.Expr]:
    """Return the mask of keys behind each query's own, where the operator has one."""
    kind = call.attrs.causal_mask
    if kind is None:
        return []
    own = np.arange(queries)[:, None] + (keys - queries if str(kind) == "BottomRight" else 0)
    added = np.where(np.arange(keys) > own, _MASKED.get(dtype, _WIDE_MASKED), 0.0)
    return [relax.const(added.astype(numpy_dtype(dtype)), dtype)]
