"""Owns the passes that bring the padding of convolutions to the form of rule conv2d.

Knows nothing of rules: each pass is right for every module.
"""

from __future__ import annotations

from tvm import relax

from kerneldecl.compiler.graph.rewriting import Rewriter, graph_pass

_CONV2D = "relax.nn.conv2d"
_IMAGES = {"NCHW", "NHWC"}


@graph_pass
class MergePadding(Rewriter):
    """Makes zeros that are added to an image before a convolution a part of the convolution."""

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator != _CONV2D or call.attrs.data_layout not in _IMAGES:
            return call
        pad = self.producer(call.args[0], "relax.nn.pad")
        added = None if pad is None else _zeros_of_image(pad, call.attrs.data_layout)
        if pad is None or added is None:
            return call
        return _convolved(pad.args[0], call, [a + b for a, b in zip(_four_sides(call), added, strict=True)])


@graph_pass
class SplitPadding(Rewriter):
    """Makes a convolution whose sides have different padding a pad, and a convolution without padding."""

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator != _CONV2D or call.attrs.data_layout not in _IMAGES or len(set(_four_sides(call))) == 1:
            return call
        padded = self.builder_.emit(relax.op.nn.pad(call.args[0], _widths(_four_sides(call), call.attrs.data_layout)))
        return _convolved(padded, call, [0] * 4)


def _four_sides(conv: relax.Call) -> list[int]:
    """Return a convolution's padding as top, left, bottom and right."""
    sides = [int(extent) for extent in conv.attrs.padding]
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
        out_dtype=attrs.out_dtype,
    )
