"""Owns the passes that bring convolutions to the form of rule conv2d: its layout, its padding, its bias, and what stands around them.

Knows nothing of rules: each pass is right for every module.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from kerneldecl.compiler.graph.rewriting import Rewriter, array_of, constant, dtype_of, static_shape

_CONV2D, _PAD = "relax.nn.conv2d", "relax.nn.pad"
_BROADCASTING = {f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum")}


@tvm.transform.module_pass(opt_level=0, name="MergePadding")
class MergePadding:
    """Makes zeros that are added to an image before a convolution a part of it, if all four sides have as many then.

    A convolution with different padding of its sides becomes a pad, and a convolution without padding.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        return _MergePadding(mod).rewritten_module(mod)


@relax.expr_functor.mutator
class _MergePadding(Rewriter):
    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator != _CONV2D or call.attrs.data_layout not in {"NCHW", "NHWC"}:
            return call
        own = _four_sides(call.attrs.padding)
        source, added = self._unpadded(call.args[0], call.attrs.data_layout)
        sides = [a + b for a, b in zip(own, added, strict=True)]
        if len(set(sides)) == 1:
            return _convolved(source, call, sides) if any(added) else call
        if not any(own):
            return call
        padded = self.builder_.emit(relax.op.nn.pad(source, _widths(sides, call.attrs.data_layout)))
        return _convolved(padded, call, [0] * 4)

    def _unpadded(self, data: relax.Expr, layout: str) -> tuple[relax.Expr, list[int]]:
        """Return the image before zeros were added to it, and how many there are at top, left, bottom and right."""
        pad = self.producer(data, _PAD)
        added = None if pad is None else _zeros_of_image(pad, layout)
        return (data, [0] * 4) if pad is None or added is None else (pad.args[0], added)


def _four_sides(padding: Any) -> list[int]:
    """Return a convolution's padding as top, left, bottom and right."""
    sides = [int(extent) for extent in padding]
    return sides * (4 // len(sides))


def _zeros_of_image(pad: relax.Call, layout: str) -> list[int] | None:
    """Return the zeros at top, left, bottom and right; None for other padding."""
    widths = [int(width) for width in pad.attrs.pad_width]
    if pad.attrs.pad_mode != "constant" or float(pad.attrs.pad_value) or len(widths) != 8 or min(widths) < 0:
        return None
    (top, bottom), (left, right) = (widths[2 * layout.index(axis) : 2 * layout.index(axis) + 2] for axis in "HW")
    return [top, left, bottom, right] if sum(widths) == top + bottom + left + right else None


def _widths(sides: list[int], layout: str) -> list[int]:
    top, left, bottom, right = sides
    by_axis = {"H": [top, bottom], "W": [left, right]}
    return [width for axis in layout for width in by_axis.get(axis, [0, 0])]


def _convolved(data: relax.Expr, conv: relax.Call, sides: list[int]) -> relax.Call:
    """Return a convolution of other data with other padding."""
    attrs = conv.attrs
    return relax.op.nn.conv2d(
        data,
        conv.args[1],
        strides=list(attrs.strides),
        padding=sides,
        dilation=list(attrs.dilation),
        groups=int(attrs.groups),
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
        out_dtype=str(attrs.out_dtype) or None,
    )


@tvm.transform.module_pass(opt_level=0, name="ChannelsLast")
class ChannelsLast:
    """Gives convolutions of NCHW images NHWC ones, with HWIO weights, and what stands between them the same.

    It is TVM's ConvertLayout for modules that have such convolutions; others stay as they are.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        if not any(_has_channels_first(func) for func in mod.functions.values() if isinstance(func, relax.Function)):
            return mod
        return relax.transform.ConvertLayout({_CONV2D: ["NHWC", "HWIO"]})(mod)


def _has_channels_first(func: relax.Function) -> bool:
    found: list[relax.Call] = []

    def note(expr: relax.Expr) -> None:
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and expr.op.name == _CONV2D and expr.attrs.data_layout == "NCHW":
            found.append(expr)

    relax.analysis.post_order_visit(func, note)
    return bool(found)


@tvm.transform.module_pass(opt_level=0, name="VectorBiases")
class VectorBiases:
    """Makes constants that broadcast along all axes but the last vectors: a bias of a convolution is [f], not [1, 1, 1, f]."""

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        return _VectorBiases(mod).rewritten_module(mod)


@relax.expr_functor.mutator
class _VectorBiases(Rewriter):
    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator not in _BROADCASTING:
            return call
        other, value = static_shape(call.args[0]), array_of(call.args[1])
        if value is None or value.ndim < 2 or other is None or len(other) < value.ndim or value.size != value.shape[-1]:
            return call
        return relax.Call(call.op, [call.args[0], constant(value.reshape(-1), dtype_of(call.args[1]))], call.attrs)


@tvm.transform.module_pass(opt_level=0, name="SimplifyShapes")
class SimplifyShapes:
    """Makes permutations that move only axes of extent 1 reshapes, which are views, and adaptive pooling to one pixel a mean.

    A reshape of a reshape becomes one.
    """

    def transform_module(self, mod: tvm.IRModule, _: Any) -> tvm.IRModule:
        return _SimplifyShapes(mod).rewritten_module(mod)


@relax.expr_functor.mutator
class _SimplifyShapes(Rewriter):
    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        shape = static_shape(call)
        if operator == "relax.nn.adaptive_avg_pool2d":
            layout = str(call.attrs.layout)
            is_global = shape is not None and all(shape[layout.index(axis)] == 1 for axis in "HW")
            return relax.op.mean(call.args[0], [layout.index("H"), layout.index("W")], keepdims=True) if is_global else call
        if shape is None:
            return call
        if operator == "relax.permute_dims" and _moves_only_ones(call):
            return self._reshaped(call.args[0], shape)
        return self._reshaped(call.args[0], shape) if operator == "relax.reshape" else call

    def _reshaped(self, value: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        while (before := self.producer(value, "relax.reshape")) is not None:
            value = before.args[0]
        return value if static_shape(value) == shape else relax.op.reshape(value, shape)


def _moves_only_ones(call: relax.Call) -> bool:
    extents = static_shape(call.args[0])
    if extents is None:
        return False
    axes = reversed(range(len(extents))) if call.attrs.axes is None else call.attrs.axes
    moved = [int(axis) for axis in axes if extents[int(axis)] != 1]
    return moved == sorted(moved)
