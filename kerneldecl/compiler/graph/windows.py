"""Owns the layouts of convolutions in models and in rules, and the rule that a convolution with channels last is.

Knows nothing of what follows a convolution, nor of how it is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tvm import relax

from kerneldecl.compiler.graph.rewriting import dtype_of, static_shape
from kerneldecl.compiler.graph.rule_use import FLOATS, Use, dtype_attr

TRANSPOSED = "relax.nn.conv2d_transpose"


class Layouts(NamedTuple):
    """The order of the axes of images and weights, as models have them and as rules do."""

    rule: str
    first: str
    """Images of a model, channels first."""
    first_weights: str
    last: str
    """Images of the rule, channels last."""
    weights: str


LAYOUTS: Mapping[str, Layouts] = {
    "relax.nn.conv1d": Layouts("conv1d", "NCW", "OIW", "NWC", "WIO"),
    "relax.nn.conv2d": Layouts("conv2d", "NCHW", "OIHW", "NHWC", "HWIO"),
    "relax.nn.conv3d": Layouts("conv3d", "NCDHW", "OIDHW", "NDHWC", "DHWIO"),
    TRANSPOSED: Layouts("conv2d_transpose", "NCHW", "IOHW", "NHWC", "HWIO"),
}
"""By the operator."""
IMAGES: Mapping[str, str] = {of.first: of.last for of in LAYOUTS.values()}
"""The layout of images with channels last, by that with channels first."""


def window_use(call: relax.Call) -> Use | None:
    """Return the rule of a convolution with channels last; None for what no rule takes."""
    of, attrs = LAYOUTS[str(call.op.name)], call.attrs
    if (attrs.data_layout, attrs.kernel_layout) != (of.last, of.weights) or attrs.out_layout not in {"", of.last}:
        return None
    if call.op.name == TRANSPOSED:
        return transposed_use(call)
    sizes = _sizes(call)
    if sizes is None:
        return None
    count = len(of.last) - 2
    padding = list(attrs.padding) * (2 * count // len(attrs.padding))
    window = {
        **_of_sides("stride", "strides", attrs.strides, 1),
        **_of_sides("padding", "pads", padding, 0),
        **_of_sides("dilation", "dilations", attrs.dilation, 1),
    }
    channels = {"c": sizes["c"] * int(attrs.groups)}
    groups = {"groups": int(attrs.groups)} if int(attrs.groups) > 1 else {}
    return Use(of.rule, {**sizes, **channels, **window, **groups, **dtype_attr(dtype_of(call.args[0]))}, tuple(call.args))


def transposed_use(call: relax.Call) -> Use | None:
    """Return the rule of a transposed convolution, in either layout of its images; None for what it does not take.

    It has one stride, one padding and one output padding for all sides, no dilation and no groups.
    """
    attrs, sizes = call.attrs, _sizes(call)
    sides = {"stride": (attrs.strides, 1), "padding": (attrs.padding, 0), "extra": (attrs.output_padding, 0)}
    given = {name: {int(each) for each in values} for name, (values, _) in sides.items()}
    is_plain = int(attrs.groups) == 1 and all(int(each) == 1 for each in attrs.dilation)
    if sizes is None or not is_plain or any(len(values) > 1 for values in given.values()):
        return None
    window = {name: value for name, values in given.items() for value in values if value != sides[name][1]}
    use = Use("conv2d_transpose", {**sizes, **window, **dtype_attr(dtype_of(call.args[0]))}, tuple(call.args))
    return None if any(use.instance.problems()) else use


def _sizes(call: relax.Call) -> dict[str, int] | None:
    """Return the extents of images and weights, `c` being input channels of one group; None for those that no rule takes."""
    (image, kernel), dtype = (static_shape(arg) for arg in call.args), dtype_of(call.args[0])
    if image is None or kernel is None or dtype not in FLOATS or dtype_of(call.args[1]) != dtype or not all((*image, *kernel)):
        return None
    of_image = dict(zip(call.attrs.data_layout.lower(), image, strict=True))
    of_kernel = dict(zip(call.attrs.kernel_layout.lower(), kernel, strict=True))
    f, channels = of_kernel.pop("o"), of_kernel.pop("i")
    return of_image | {"c": channels, "f": f} | {f"k{side}": of_kernel[side] for side in "dhw" if side in of_kernel}


def _of_sides(one: str, several: str, values: Sequence[Any], default: int) -> dict[str, Any]:
    """Return an attribute for all sides where they are the same, for each of them where they differ."""
    given = tuple(int(value) for value in values)
    if len(set(given)) > 1:
        return {several: given}
    return {} if given[0] == default else {one: given[0]}
