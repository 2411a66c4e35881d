"""Owns the passes that write elementwise operators as rules do: clips, the order of operands, and biases as vectors.

Knows nothing of what the operators follow, but that a sum ends in what accumulates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import relax

from kerneldecl.compiler.graph.named_constants import array_of, constant, name_of
from kerneldecl.compiler.graph.rewriting import Rewriter, dtype_of, graph_pass, static_shape
from kerneldecl.compiler.graph.windows import LAYOUTS

_COMMUTATIVE = {f"relax.{name}" for name in ("add", "multiply", "maximum", "minimum")}
_BROADCASTING = _COMMUTATIVE | {"relax.subtract", "relax.divide"}
_ACCUMULATING = ("relax.matmul", *LAYOUTS)


@graph_pass
class SimplifyClips(Rewriter):
    """Makes clips maxima and minima with constants, which keep the layout of images, and a maximum with 0 relu.

    TVM's ONNX importer writes a clip as two functions of TensorIR; they become operators again.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator == "relax.call_tir":
            return self._bounded(call)
        if operator == "relax.clip" and _is_float(call):
            lowest, highest = (float(bound.value) for bound in call.args[1:])
            if lowest > highest:
                return call  # which of them wins is the operator's choice
            return _at_most(_at_least(call.args[0], lowest), highest)
        return call

    def _bounded(self, call: relax.Call) -> relax.Expr:
        """Return a call of a function that has one scalar bound as an operator; any other call as it is."""
        bound = _bound_of(self.builder_.get()[call.args[0]])
        arguments = list(call.args[1].fields) if isinstance(call.args[1], relax.Tuple) else []
        value = array_of(self.known(arguments[1])) if bound is not None and len(arguments) == 2 else None
        if bound is None or value is None or value.ndim or not _is_float(call):
            return call
        return bound(arguments[0], float(value))


def _is_float(call: relax.Call) -> bool:
    return isinstance(call.ty, relax.TensorType) and dtype_of(call).startswith(("float", "bfloat"))


def _at_least(value: relax.Expr, lowest: float) -> relax.Expr:
    if lowest == 0:
        return relax.op.nn.relu(value)
    return value if lowest == -math.inf else relax.op.maximum(value, relax.const(lowest, dtype_of(value)))


def _at_most(value: relax.Expr, highest: float) -> relax.Expr:
    return value if highest == math.inf else relax.op.minimum(value, relax.const(highest, _dtype_below(value)))


def _dtype_below(value: relax.Expr) -> str:
    """Return the dtype of a value, which operators that are new here have from their first operand."""
    return _dtype_below(value.args[0]) if isinstance(value, relax.Call) and not isinstance(value.ty, relax.TensorType) else dtype_of(value)


def _bound_of(func: tvm.tirx.PrimFunc) -> Callable[[relax.Expr, float], relax.Expr] | None:
    """Return what a function does that takes a tensor and a scalar, element by element: `_at_least` or `_at_most`; else None."""
    stored = func.body
    while isinstance(stored, tvm.s_tir.SBlockRealize | tvm.tirx.For):
        stored = stored.block.body if isinstance(stored, tvm.s_tir.SBlockRealize) else stored.body
    if not isinstance(stored, tvm.tirx.BufferStore) or not isinstance(stored.value, tvm.tirx.Max | tvm.tirx.Min):
        return None
    first, last = stored.value.a, stored.value.b
    loads = isinstance(first, tvm.ir.TensorLoad) and isinstance(last, tvm.ir.TensorLoad)
    if not loads or len(last.indices) or not tvm_ffi.structural_equal(first.indices, stored.indices):
        return None
    return _at_least if isinstance(stored.value, tvm.tirx.Max) else _at_most


@graph_pass
class OrderOperands(Rewriter):
    """Puts the constant of a commutative operator last, and in a sum what a convolution or a matmul accumulates first."""

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator not in _COMMUTATIVE:
            return call
        first, last = call.args
        is_constant = [isinstance(arg, tvm.ir.GenericConst) for arg in (first, last)]
        accumulates = operator == "relax.add" and self._accumulates(last) and not self._accumulates(first)
        swaps = is_constant == [True, False] or (accumulates and not any(is_constant))
        return relax.Call(call.op, [last, first], call.attrs) if swaps else call

    def _accumulates(self, value: relax.Expr) -> bool:
        """Say whether a value is what a GEMM or a convolution accumulates, perhaps with a bias, that nothing else reads."""
        biased = self.producer(value, "relax.add")
        if biased is not None and isinstance(biased.args[1], tvm.ir.GenericConst) and self.is_read_once(value):
            value = biased.args[0]
        return self.is_read_once(value) and any(self.producer(value, operator) is not None for operator in _ACCUMULATING)


@graph_pass
class VectorBiases(Rewriter):
    """Makes constants that broadcast along all axes but the last vectors: a bias of a convolution is [f], not [1, 1, 1, f]."""

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator not in _BROADCASTING:
            return call
        other, value = static_shape(call.args[0]), array_of(call.args[1])
        if value is None or value.ndim < 2 or other is None or len(other) < value.ndim or value.size != value.shape[-1]:
            return call
        return relax.Call(call.op, [call.args[0], constant(value.reshape(-1), dtype_of(call.args[1]), name_of(call.args[1]))], call.attrs)


@graph_pass
class SeparateGates(Rewriter):
    """Keeps what is computed for whole channels, such as a squeeze-and-excite gate, out of the kernel that applies it to every pixel.

    FuseOps would make one function of a matmul or a convolution and the elementwise operator that broadcasts its result: two computations
    of different extents, which no kernel does well. It fuses nothing across a reshape, which becomes a part of how the gate is read.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        shape = static_shape(call) if operator in _BROADCASTING else None
        if shape is None or all(self._is_read_whole(arg, shape) for arg in call.args):
            return call
        args = [arg if self._is_read_whole(arg, shape) else relax.op.reshape(arg, static_shape(arg)) for arg in call.args]
        return relax.Call(call.op, args, call.attrs)

    def _is_read_whole(self, arg: relax.Expr, shape: tuple[int, ...]) -> bool:
        """Say whether an operand is a constant, an argument or a view, or is as large as the result."""
        extents = static_shape(arg)
        bound = self.lookup_binding(arg) if isinstance(arg, relax.Var) else None
        is_computed = isinstance(bound, relax.Call) and self.producer(arg, "relax.reshape") is None
        return not is_computed or extents is None or math.prod(extents) == math.prod(shape)
