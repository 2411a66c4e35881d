"""Owns the change of a graph's images from NCHW to NHWC, the layout of rule conv2d: around convolutions, and along what follows them.

Knows nothing of rules. TVM's own ConvertLayout ends in a bad allocation where a reshape or a concatenation follows a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from kerneldecl.compiler.graph.rewriting import Rewriter, graph_pass

_TO_NCHW = [0, 3, 1, 2]
"""The axes of an NHWC array in the order of NCHW, which are also the NHWC axes that each axis of NCHW is."""
_TO_NHWC = [0, 2, 3, 1]
_OIHW_TO_HWIO = [2, 3, 1, 0]
_RANK = 4
_UNARY = frozenset(
    f"relax.{name}"
    for name in (
        "abs", "acos", "acosh", "asin", "asinh", "astype", "atan", "atanh", "ceil", "clip", "cos", "cosh", "erf", "exp", "floor",
        "isfinite", "isinf", "isnan", "log", "logical_not", "negative", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.relu",
        "nn.silu", "nn.softplus", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh",
    )
)  # fmt: skip
_BROADCASTING = frozenset(
    f"relax.{name}"
    for name in (
        "add", "divide", "equal", "floor_divide", "greater", "greater_equal", "less", "less_equal", "logical_and", "logical_or", "maximum",
        "minimum", "multiply", "not_equal", "power", "subtract", "where",
    )
)  # fmt: skip
_POOLING = frozenset(f"relax.nn.{name}" for name in ("adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"))
_NORMS = frozenset({"relax.nn.group_norm", "relax.nn.instance_norm"})
_REDUCTIONS = frozenset(f"relax.{name}" for name in ("max", "mean", "min", "prod", "std", "sum", "variance"))


@graph_pass
class ChannelsLast(Rewriter):
    """Gives convolutions of NCHW images NHWC ones with HWIO weights, and elementwise operators, pooling and reductions after them the same.

    Every image is a transpose of its NHWC form, which moves behind the operators that allow it. So one transpose goes in front of an
    image, and one behind what comes of it where an operator needs the old layout. A norm before the first convolution has NHWC, too.
    """

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator == "relax.nn.conv2d":
            return self._convolution(call)
        if operator == "relax.permute_dims":
            return self._transposed(call)
        if operator == "relax.concat":
            return self._concatenation(call)
        if operator in _BROADCASTING:
            return self._elementwise(call)
        image = self._image(call.args[0]) if call.args else None
        return call if image is None else self._of_one(call, operator, image)

    def _of_one(self, call: relax.Call, operator: str, image: relax.Expr) -> relax.Expr:
        """Return an operator's call for an image whose NHWC form is known."""
        if operator in _UNARY:
            return self._channels_first(relax.Call(call.op, [image, *call.args[1:]], call.attrs))
        if operator in _POOLING and call.attrs.layout == "NCHW":
            return self._channels_first(_with_attrs(call, [image], layout="NHWC", out_layout="NHWC"))
        if operator in _REDUCTIONS:
            return self._reduction(call, image)
        if operator in _NORMS and int(call.attrs.channel_axis) % _RANK == 1:
            return self._channels_first(_norm_of(call, image))
        if operator == "relax.nn.pad":
            widths = [int(width) for width in call.attrs.pad_width]
            moved = [width for axis in _TO_NHWC for width in widths[2 * axis : 2 * axis + 2]]
            return self._channels_first(_with_attrs(call, [image], pad_width=moved))
        return call

    def _image(self, value: relax.Expr) -> relax.Expr | None:
        """Return the NHWC form of an image that is a transpose of it; None for anything else."""
        transpose = self.producer(value, "relax.permute_dims")
        return transpose.args[0] if transpose is not None and _axes_of(transpose) == _TO_NCHW else None

    def _channels_first(self, image: relax.Expr) -> relax.Expr:
        return relax.op.permute_dims(self.builder_.emit(image), _TO_NCHW)

    def _channels_last(self, value: relax.Expr) -> relax.Expr:
        known = self._image(value)
        if known is None:
            known = self._after_norm(value)
        return self.builder_.emit(relax.op.permute_dims(value, _TO_NHWC)) if known is None else known

    def _after_norm(self, value: relax.Expr) -> relax.Expr | None:
        """Return the NHWC form of a norm of an NCHW image, elementwise operators behind it included; None for anything else.

        The image is transposed before the norm, no more work than after it; a residual block reads the same transpose beside the norm.
        """
        call = self.call_of(value)
        if call is None or not self.is_read_once(value) or _rank(value) != _RANK:
            return None
        if call.op.name in _NORMS and int(call.attrs.channel_axis) % _RANK == 1:
            cast = self.producer(call.args[0], "relax.astype")
            image = self._channels_last(call.args[0] if cast is None else cast.args[0])
            wide = image if cast is None else self.builder_.emit(relax.Call(cast.op, [image], cast.attrs))
            return self.builder_.emit(_norm_of(call, wide))
        inner = self._after_norm(call.args[0]) if call.op.name in _UNARY else None
        return None if inner is None else self.builder_.emit(relax.Call(call.op, [inner, *call.args[1:]], call.attrs))

    def _convolution(self, call: relax.Call) -> relax.Expr:
        attrs = call.attrs
        if (attrs.data_layout, attrs.kernel_layout) != ("NCHW", "OIHW") or attrs.out_layout not in {"", "NCHW"}:
            return call
        weights = self.builder_.emit(relax.op.permute_dims(call.args[1], _OIHW_TO_HWIO))
        layouts = {"data_layout": "NHWC", "kernel_layout": "HWIO", "out_layout": "NHWC"}
        return self._channels_first(_with_attrs(call, [self._channels_last(call.args[0]), weights], **layouts))

    def _transposed(self, call: relax.Call) -> relax.Expr:
        image = self._image(call.args[0])
        axes = None if image is None else [_TO_NCHW[axis] for axis in _axes_of(call)]
        if axes is None:
            return call
        return image if axes == list(range(_RANK)) else relax.op.permute_dims(image, axes)

    def _elementwise(self, call: relax.Call) -> relax.Expr:
        ranks = [_rank(arg) for arg in call.args]
        if not any(self._image(arg) is not None for arg in call.args) or any(rank is None or rank > _RANK for rank in ranks):
            return call
        return self._channels_first(relax.Call(call.op, [self._broadcast(arg) for arg in call.args], call.attrs))

    def _broadcast(self, value: relax.Expr) -> relax.Expr:
        """Return what an operand that broadcasts to an image is beside the image's NHWC form."""
        rank = _rank(value)
        assert rank is not None, "the caller knows all ranks"
        if rank == 0:
            return value
        if rank < _RANK:
            value = self.builder_.emit(relax.op.expand_dims(value, list(range(_RANK - rank))))
        return self._channels_last(value)

    def _concatenation(self, call: relax.Call) -> relax.Expr:
        parts = call.args[0]
        if not isinstance(parts, relax.Tuple):
            parts = self.lookup_binding(parts)
        if not isinstance(parts, relax.Tuple) or not any(self._image(part) is not None for part in parts.fields):
            return call
        moved = relax.Tuple([self._channels_last(part) for part in parts.fields])
        return self._channels_first(relax.op.concat(moved, _TO_NCHW[int(call.attrs.axis) % _RANK]))

    def _reduction(self, call: relax.Call, image: relax.Expr) -> relax.Expr:
        axes = range(_RANK) if call.attrs.axis is None else [int(axis) % _RANK for axis in call.attrs.axis]
        reduced = _with_attrs(call, [image], axis=[_TO_NCHW[axis] for axis in axes])
        if call.attrs.keepdims:
            return self._channels_first(reduced)
        left = [_TO_NCHW[axis] for axis in range(_RANK) if axis not in axes]
        if left == sorted(left):
            return reduced
        return relax.op.permute_dims(self.builder_.emit(reduced), [sorted(left).index(axis) for axis in left])


def _norm_of(norm: relax.Call, image: relax.Expr) -> relax.Call:
    """Return the norm of an NHWC image that one of NCHW is."""
    axes = sorted(_TO_NCHW[int(axis) % _RANK] for axis in norm.attrs.axes)
    return _with_attrs(norm, [image, *norm.args[1:]], channel_axis=_RANK - 1, axes=axes)


def _with_attrs(call: relax.Call, args: Sequence[relax.Expr], **changed: Any) -> relax.Call:
    """Return a call of the operator with other arguments and some attributes changed."""
    info = type(call.attrs).__tvm_ffi_type_info__
    kept = {field.name: getattr(call.attrs, field.name) for field in info.fields}
    return relax.Call(call.op, list(args), tvm.ir.make_node(info.type_key, **{**kept, **changed}))


def _axes_of(transpose: relax.Call) -> list[int]:
    rank = _rank(transpose.args[0])
    axes = transpose.attrs.axes
    return list(range(rank or 0))[::-1] if axes is None else [int(axis) % (rank or 1) for axis in axes]


def _rank(value: relax.Expr) -> int | None:
    """Return a tensor's rank; None for an unknown one, and for what is no tensor."""
    rank = getattr(value.ty, "ndim", -1)
    return rank if rank >= 0 else None
