"""Owns the pass that takes tensors without elements away: a reduction over nothing has its value, a concatenation lacks them.

Knows nothing of where the module comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from tvm import relax

from kerneldecl.compiler.graph.named_constants import constant
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape

_OF_NOTHING: Mapping[str, float] = {
    "relax.sum": 0.0,
    "relax.prod": 1.0,
    "relax.max": -math.inf,
    "relax.min": math.inf,
    "relax.mean": math.nan,
    "relax.variance": math.nan,
    "relax.std": math.nan,
    "relax.matmul": 0.0,
}


@graph_pass
class EmptyTensors(Rewriter):
    """Makes sums, products, extremes, means and GEMMs over an extent of 0 constants: 0, 1, the worst value of the dtype, NaN.

    TVM sets an accumulator in the reduction's first iteration, so that without one the result is whatever was in memory.
    Concatenations leave out what has no elements, such as the part of a head that a rotary embedding of all of it does not turn.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator == "relax.concat":
            return self._concatenated(call)
        if operator not in _OF_NOTHING or all(0 not in (static_shape(arg) or (1,)) for arg in call.args):
            return call
        result = self.builder_.normalize(call)
        shape = static_shape(result)
        if shape is None or 0 in shape:
            return call
        return constant(np.full(shape, _of_nothing(operator, dtype_of(result))), dtype_of(result))

    def _concatenated(self, call: relax.Call) -> relax.Expr:
        parts = self._parts(call.args[0])
        kept = [part for part in parts if 0 not in (static_shape(part) or (1,))]
        if len(kept) == len(parts) or not kept:
            return call
        return kept[0] if len(kept) == 1 else relax.op.concat(kept, call.attrs.axis)

    def _parts(self, value: relax.Expr) -> list[relax.Expr]:
        bound = self.lookup_binding(value) if isinstance(value, relax.Var) else value
        return list(bound.fields) if isinstance(bound, relax.Tuple) else []


def _of_nothing(operator: str, dtype: str) -> float | int:
    """Return the value of a reduction over nothing; integers, which have no infinity, end at the largest and smallest of their dtype."""
    value = _OF_NOTHING[operator]
    if not math.isinf(value) or dtype.startswith(("float", "bfloat")):
        return value
    limits = np.iinfo(dtype)
    return int(limits.max if value > 0 else limits.min)
