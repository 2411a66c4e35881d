"""Owns the passes that bring the padding of convolutions to the form of their rules.

Knows nothing of rules: each pass is right for every module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import relax

from kerneldecl.compiler.graph.rewriting import Rewriter, graph_pass

_CONV2D = "relax.nn.conv2d"
_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "relax.nn.conv1d": relax.op.nn.conv1d,
    _CONV2D: relax.op.nn.conv2d,
    "relax.nn.conv3d": relax.op.nn.conv3d,
}
_IMAGES = frozenset({"NCW", "NWC", "NCHW", "NHWC", "NCDHW", "NDHWC"})


@graph_pass
class MergePadding(Rewriter):
    """Makes zeros that are added to an image before a convolution a part of the convolution."""

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator not in _OPERATORS or call.attrs.data_layout not in _IMAGES:
            return call
        pad = self.producer(call.args[0], "relax.nn.pad")
        added = None if pad is None else _zeros_of_image(pad, call.attrs.data_layout)
        if pad is None or added is None:
            return call
        return _convolved(pad.args[0], call, [a + b for a, b in zip(_all_sides(call), added, strict=True)])


@graph_pass
class SplitPadding(Rewriter):
    """Makes a convolution of images whose sides have different padding a pad, and a convolution without padding."""

    def rewritten(self, call: relax.Call, operator: str) -> relax.Expr:
        if operator != _CONV2D or call.attrs.data_layout not in _IMAGES or len(set(_all_sides(call))) == 1:
            return call
        padded = self.builder_.emit(relax.op.nn.pad(call.args[0], _widths(_all_sides(call), call.attrs.data_layout)))
        return _convolved(padded, call, [0] * 4)


def _all_sides(conv: relax.Call) -> list[int]:
    """Return a convolution's padding before each side, then after each: top, left, bottom and right of an image."""
    sides = [int(extent) for extent in conv.attrs.padding]
    return sides * (2 * (len(conv.attrs.data_layout) - 2) // len(sides))


def _zeros_of_image(pad: relax.Call, layout: str) -> list[int] | None:
    """Return the zeros before each side, then after each; None for other padding."""
    widths = [int(width) for width in pad.attrs.pad_width]
    if pad.attrs.pad_mode != "constant" or float(pad.attrs.pad_value) or len(widths) != 2 * len(layout) or min(widths) < 0:
        return None
    around = [widths[2 * at : 2 * at + 2] for at, axis in enumerate(layout) if axis not in "NC"]
    zeros = [before for before, _ in around] + [after for _, after in around]
    return zeros if sum(widths) == sum(zeros) else None


def _widths(sides: list[int], layout: str) -> list[int]:
    top, left, bottom, right = sides
    by_axis = {"H": [top, bottom], "W": [left, right]}
    return [width for axis in layout for width in by_axis.get(axis, [0, 0])]


def _convolved(data: relax.Expr, conv: relax.Call, sides: list[int]) -> relax.Call:
    """Return a convolution of other data with other padding."""
    attrs = conv.attrs
    return _OPERATORS[str(conv.op.name)](
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
