"""Owns the change of a graph's images to channels last, the layout of convolutions' rules: around these, and along what follows them.

Knows nothing of epilogues. An image may be a sequence or a volume. TVM's own ConvertLayout ends in a bad allocation where a reshape or a
concatenation follows a convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from kerneldecl.compiler.graph.rewriting import Rewriter, graph_pass, static_shape
from kerneldecl.compiler.graph.windows import IMAGES, LAYOUTS, TRANSPOSED, transposed_use

_RANKS = frozenset({3, 4, 5})
_SEQUENCE = 3
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
_POOLING = frozenset(f"relax.nn.{name}{sides}d" for name in ("adaptive_avg_pool", "avg_pool", "max_pool") for sides in (1, 2, 3))
_NORMS = frozenset({"relax.nn.group_norm", "relax.nn.instance_norm"})
_REDUCTIONS = frozenset(f"relax.{name}" for name in ("max", "mean", "min", "prod", "std", "sum", "variance"))


@graph_pass
class ChannelsLast(Rewriter):
    """Gives convolutions images and weights with channels last, and elementwise operators, pooling and reductions after them the same.

    Every image is a transpose of its form with channels last, which moves behind the operators that allow it. So one transpose goes in
    front of an image, and one behind what comes of it where an operator needs the old layout. A norm before the first convolution has
    channels last, too. Transposed convolutions that rule conv2d_transpose does not take stay: TVM lowers them channels first alone.
    """

    def begin(self, func: relax.Function) -> None:
        super().begin(func)
        self._made: set[relax.Var] = set()

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator in LAYOUTS:
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
        """Return an operator's call for an image whose form with channels last is known."""
        rank = _known_rank(image)
        if operator in _UNARY:
            return self._channels_first(relax.Call(call.op, [image, *call.args[1:]], call.attrs))
        if operator in _POOLING and call.attrs.layout in IMAGES:
            layout = IMAGES[call.attrs.layout]
            return self._channels_first(_with_attrs(call, [image], layout=layout, out_layout=layout))
        if operator in _REDUCTIONS or operator == "relax.reshape":
            return self._reduction(call, image) if operator in _REDUCTIONS else self._reshaped(call, image)
        if operator in _NORMS and int(call.attrs.channel_axis) % rank == 1:
            return self._channels_first(_norm_of(call, image))
        if operator == "relax.nn.pad":
            widths = [int(width) for width in call.attrs.pad_width]
            moved = [width for axis in _to_last(rank) for width in widths[2 * axis : 2 * axis + 2]]
            return self._channels_first(_with_attrs(call, [image], pad_width=moved))
        return call

    def _image(self, value: relax.Expr) -> relax.Expr | None:
        """Return the form with channels last of an image that is a transpose of it; None for anything else.

        Of three axes only those are images that come of a convolution: matrices are transposed for many reasons.
        """
        image = self._before_transpose(value)
        return None if image is not None and _rank(image) == _SEQUENCE and image not in self._made else image

    def _before_transpose(self, value: relax.Expr) -> relax.Expr | None:
        transpose = self.producer(value, "relax.permute_dims")
        rank = _rank(value)
        is_image = transpose is not None and rank in _RANKS and _axes_of(transpose) == _to_first(rank)
        return transpose.args[0] if transpose is not None and is_image else None

    def _channels_first(self, image: relax.Expr) -> relax.Expr:
        made = self.builder_.emit(image)
        self._made.add(made)
        return relax.op.permute_dims(made, _to_first(_known_rank(made)))

    def _channels_last(self, value: relax.Expr) -> relax.Expr:
        known = self._before(value)
        return self.builder_.emit(relax.op.permute_dims(value, _to_last(_known_rank(value)))) if known is None else known

    def _before(self, value: relax.Expr) -> relax.Expr | None:
        """Return the form with channels last of a transpose or a norm, elementwise operators behind it included; None for anything else.

        An image is transposed before its norm, no more work than after it; a residual block reads the same transpose beside the norm.
        """
        image = self._before_transpose(value)
        if image is not None:
            return image
        call, rank = self.call_of(value), _rank(value)
        if call is None or not self.is_read_once(value) or rank not in _RANKS:
            return None
        if call.op.name in _NORMS and int(call.attrs.channel_axis) % rank == 1:
            cast = self.producer(call.args[0], "relax.astype")
            image = self._channels_last(call.args[0] if cast is None else cast.args[0])
            wide = image if cast is None else self.builder_.emit(relax.Call(cast.op, [image], cast.attrs))
            return self.builder_.emit(_norm_of(call, wide))
        inner = self._before(call.args[0]) if call.op.name in _UNARY else None
        return None if inner is None else self.builder_.emit(relax.Call(call.op, [inner, *call.args[1:]], call.attrs))

    def _convolution(self, call: relax.Call) -> relax.Expr:
        attrs, operator = call.attrs, str(call.op.name)
        of = LAYOUTS[operator]
        if (attrs.data_layout, attrs.kernel_layout) != (of.first, of.first_weights) or attrs.out_layout not in {"", of.first}:
            return call
        if operator == TRANSPOSED and transposed_use(call) is None:
            return call
        weights = self.builder_.emit(relax.op.permute_dims(call.args[1], [of.first_weights.index(axis) for axis in of.weights]))
        layouts = {"data_layout": of.last, "kernel_layout": of.weights, "out_layout": of.last}
        return self._channels_first(_with_attrs(call, [self._channels_last(call.args[0]), weights], **layouts))

    def _transposed(self, call: relax.Call) -> relax.Expr:
        image = self._image(call.args[0])
        if image is None:
            return call
        rank = _known_rank(image)
        axes = [_to_first(rank)[axis] for axis in _axes_of(call)]
        return image if axes == list(range(rank)) else relax.op.permute_dims(image, axes)

    def _elementwise(self, call: relax.Call) -> relax.Expr:
        ranks = [_rank(arg) for arg in call.args]
        known = [rank for rank in ranks if rank is not None]
        is_image = [rank == max(known) and self._image(arg) is not None for arg, rank in zip(call.args, ranks, strict=True) if known]
        if len(known) < len(ranks) or not any(is_image):
            return call
        return self._channels_first(relax.Call(call.op, [self._broadcast(arg, max(known)) for arg in call.args], call.attrs))

    def _broadcast(self, value: relax.Expr, rank: int) -> relax.Expr:
        """Return what an operand that broadcasts to an image of some rank is beside the image's form with channels last."""
        missing = rank - _known_rank(value)
        if missing == rank:
            return value
        if missing:
            value = self.builder_.emit(relax.op.expand_dims(value, list(range(missing))))
        return self._channels_last(value)

    def _concatenation(self, call: relax.Call) -> relax.Expr:
        parts = call.args[0]
        if not isinstance(parts, relax.Tuple):
            parts = self.lookup_binding(parts)
        if not isinstance(parts, relax.Tuple) or not any(self._image(part) is not None for part in parts.fields):
            return call
        moved = relax.Tuple([self._channels_last(part) for part in parts.fields])
        rank = _known_rank(parts.fields[0])
        return self._channels_first(relax.op.concat(moved, _to_first(rank)[int(call.attrs.axis) % rank]))

    def _reshaped(self, call: relax.Call, image: relax.Expr) -> relax.Expr:
        """Return an image with or without sides of one pixel: pooling of sequences is that of images."""
        reshaped = self.builder_.normalize(call)
        before, after = static_shape(call.args[0]), static_shape(reshaped)
        if before is None or after is None or len(after) not in _RANKS or before[:2] != after[:2]:
            return call
        if [extent for extent in before[2:] if extent > 1] != [extent for extent in after[2:] if extent > 1]:
            return call
        return self._channels_first(relax.op.reshape(image, (after[0], *after[2:], after[1])))

    def _reduction(self, call: relax.Call, image: relax.Expr) -> relax.Expr:
        rank = _known_rank(image)
        places = _to_first(rank)
        axes = range(rank) if call.attrs.axis is None else [int(axis) % rank for axis in call.attrs.axis]
        reduced = _with_attrs(call, [image], axis=[places[axis] for axis in axes])
        if call.attrs.keepdims:
            return self._channels_first(reduced)
        left = [places[axis] for axis in range(rank) if axis not in axes]
        if left == sorted(left):
            return reduced
        return relax.op.permute_dims(self.builder_.emit(reduced), [sorted(left).index(axis) for axis in left])


def _to_first(rank: int) -> list[int]:
    """Return the axes of an array with channels last in the order of channels first, which are also the axes that each of these is."""
    return [0, rank - 1, *range(1, rank - 1)]


def _to_last(rank: int) -> list[int]:
    return [0, *range(2, rank), 1]


def _norm_of(norm: relax.Call, image: relax.Expr) -> relax.Call:
    """Return the norm of an image with channels last that one of channels first is."""
    rank = _known_rank(image)
    axes = sorted(_to_first(rank)[int(axis) % rank] for axis in norm.attrs.axes)
    return _with_attrs(norm, [image, *norm.args[1:]], channel_axis=rank - 1, axes=axes)


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


def _known_rank(value: relax.Expr) -> int:
    rank = _rank(value)
    assert rank is not None, "the caller knows that it is an image"
    return rank
