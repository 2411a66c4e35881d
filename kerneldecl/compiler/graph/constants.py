"""Owns the pass that computes what depends on constants alone, such as weights in another layout.

Knows nothing of why a constant is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from kerneldecl.compiler.graph.named_constants import array_of, constant, name_of
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape

Array = np.ndarray[Any, Any]
_SMALL = 4096
"""Bytes that a result may always have: scalars become vectors."""


@graph_pass
class FoldConstants(Rewriter):
    """Computes operators whose arguments are constants, where the result is not larger than they are together.

    It takes the operators that importers and passes put around weights, and computes them in NumPy. TVM's FoldConstant compiles a
    function for each constant, which takes 18 s for ResNet-18; it may follow for the rest.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        args = [self.known(arg) for arg in call.args]
        if any(known is not arg for known, arg in zip(args, call.args, strict=True)):
            call = self.builder_.normalize(relax.Call(call.op, args, call.attrs, call.ty_args))
        folded = _folded(call, operator) if operator in _OPERATORS else None
        return call if folded is None else folded


def _folded(call: relax.Call, operator: str) -> tvm.ir.GenericConst | None:
    tensors = [arg for arg in call.args if not isinstance(arg, relax.ShapeExpr)]
    arrays = [array for arg in tensors if (array := array_of(arg)) is not None]
    shape = static_shape(call)
    if shape is None or not arrays or len(arrays) < len(tensors):
        return None
    dtype = dtype_of(call)
    if np.dtype(arrays[0].dtype).itemsize * np.prod(shape) > max(_SMALL, sum(array.nbytes for array in arrays)):
        return None
    name = next(filter(None, map(name_of, call.args)), "")
    return constant(_OPERATORS[operator](call, *arrays).reshape(shape), dtype, name)


def _permuted(call: relax.Call, x: Array) -> Array:
    return x.transpose(None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes])


def _same(_: relax.Call, x: Array) -> Array:
    return x


def _highest(call: relax.Call, x: Array) -> Array:
    axes = None if call.attrs.axis is None else tuple(int(axis) for axis in call.attrs.axis)
    return np.asarray(x.max(axis=axes))


_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "relax.permute_dims": _permuted,
    "relax.reshape": _same,
    "relax.expand_dims": _same,
    "relax.squeeze": _same,
    "relax.flatten": _same,
    "relax.astype": _same,
    "relax.add": lambda _, a, b: a + b,
    "relax.subtract": lambda _, a, b: a - b,
    "relax.multiply": lambda _, a, b: a * b,
    "relax.maximum": lambda _, a, b: np.asarray(np.maximum(a, b)),
    "relax.greater": lambda _, a, b: np.asarray(a > b),
    "relax.max": _highest,
    "relax.isnan": lambda _, a: np.isnan(a),
    "relax.where": lambda _, condition, a, b: np.asarray(np.where(condition, a, b)),
}
"""The value of each operator, whose shape and dtype are those of the call. Arithmetic is that of the operands' dtype, rounded once."""
