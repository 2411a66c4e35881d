"""Owns group norms as a computation: their canonical TensorIR, and the recognition of a function that is one.

Knows nothing of schedules, targets, or who declares a norm. A function is recognised as `compiler.attention` does it: by its canonical
text. So what is written here and what is recognised cannot differ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import tvm
import tvm_ffi
from tvm import te, tirx

from kerneldecl.analysis.group_norm import GroupNormSizes
from kerneldecl.compiler.canonical import canonical_module, canonical_text, signature_of

Activation = Literal["", "relu", "silu", "gelu"]
ACTIVATIONS: tuple[Activation, ...] = ("", "relu", "silu", "gelu")


@dataclass(frozen=True)
class GroupNormSpec:
    """Shape and kind of one norm: Y = activation((X - mean) / sqrt(variance + eps) * gamma + beta), statistics for each image and group."""

    shape: tuple[int, ...]
    """Images first; channels second or last; all other axes are pixels."""
    groups: int
    is_channels_last: bool
    eps: float
    dtype: str
    """Of all arguments; 16-bit ones are computed in float32."""
    activation: Activation = ""

    @property
    def channels(self) -> int:
        return self.shape[-1] if self.is_channels_last else self.shape[1]

    @property
    def accum(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def sizes(self) -> GroupNormSizes:
        """Return what policies see of the norm."""
        images, pixels = self.shape[0], math.prod(self.shape[1:]) // self.channels
        return GroupNormSizes(images, self.groups, self.channels // self.groups, pixels, self.dtype, self.is_channels_last)

    @property
    def arguments(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Return name, shape and dtype of each argument; the last one is the result."""
        shapes = {"X": self.shape, "gamma": (self.channels,), "beta": (self.channels,), "Y": self.shape}
        return tuple((name, shape, self.dtype) for name, shape in shapes.items())

    def index(self, image: Any, channel: Any, pixel: Any) -> tuple[Any, ...]:
        """Return the index of an element."""
        return (image, *pixel, channel) if self.is_channels_last else (image, channel, *pixel)

    def place(self, index: tuple[Any, ...]) -> tuple[Any, Any]:
        """Return an element's image and channel."""
        return index[0], index[-1 if self.is_channels_last else 1]


def activated(name: Activation, value: Any) -> Any:
    """Return an activation of an expression."""
    dtype = str(value.ty.dtype)
    if name == "relu":
        return tirx.max(value, tirx.const(0.0, dtype))
    if name == "silu":
        return value * tirx.sigmoid(value)
    if name == "gelu":
        half = tirx.const(0.5, dtype)
        return value * (half + tirx.erf(value * tirx.const(math.sqrt(0.5), dtype)) * half)
    return value


def group_norm(spec: GroupNormSpec) -> list[Any]:
    """Return the computation in TE, with arguments as `GroupNormSpec.arguments` has them."""
    x, gamma, beta = inputs = [te.placeholder(shape, dtype, name) for name, shape, dtype in spec.arguments[:-1]]
    size, accum = spec.channels // spec.groups, spec.accum
    rows = (spec.shape[0], spec.groups)
    extents = spec.shape[1:-1] if spec.is_channels_last else spec.shape[2:]
    count, eps = tirx.const(math.prod(extents) * size, accum), tirx.const(spec.eps, accum)

    def wide(value: Any) -> Any:
        return value if spec.dtype == accum else value.astype(accum)

    def over_group(term: Any) -> Any:
        def total(image: Any, group: Any) -> Any:
            channel = te.reduce_axis((0, size), "c")
            pixel = [te.reduce_axis((0, extent), f"p{at}") for at, extent in enumerate(extents)]
            axes = [*pixel, channel] if spec.is_channels_last else [channel, *pixel]
            return te.sum(term(image, group, spec.index(image, group * size + channel, pixel)), axis=axes)

        return total

    def square(image: Any, group: Any, index: tuple[Any, ...]) -> Any:
        return (wide(x(*index)) - mean(image, group)) * (wide(x(*index)) - mean(image, group))

    def normalised(*index: Any) -> Any:
        image, channel = spec.place(index)
        group = channel // size
        deviation = tirx.rsqrt(squares(image, group) / count + eps)
        return (wide(x(*index)) - mean(image, group)) * deviation * wide(gamma(channel)) + wide(beta(channel))

    sums = te.compute(rows, over_group(lambda _image, _group, index: wide(x(*index))), name="sums")
    mean = te.compute(rows, lambda image, group: sums(image, group) / count, name="mean")
    squares = te.compute(rows, over_group(square), name="squares")
    scaled = te.compute(spec.shape, normalised, name="normalised")

    def result(*index: Any) -> Any:
        value = activated(spec.activation, scaled(*index))
        return value if spec.dtype == accum else value.astype(spec.dtype)

    return [*inputs, te.compute(spec.shape, result, name="Y")]


def group_norm_func(spec: GroupNormSpec) -> Any:
    """Return the computation as a PrimFunc."""
    return te.create_prim_func(group_norm(spec), index_dtype_override="int64")


def read_group_norm(mod: tvm.IRModule) -> GroupNormSpec | None:
    """Return the group norm that a canonical module's `main` computes, None if it is none."""
    candidates = list(_candidates(mod["main"]))
    if not candidates:
        return None
    text = canonical_text(mod)
    return next((spec for spec in candidates if canonical_text(canonical_module(group_norm_func(spec))) == text), None)


def _candidates(func: Any) -> Iterator[GroupNormSpec]:
    """Yield the norms that a function with these parameters and constants may compute."""
    try:
        args = signature_of(func)
    except (TypeError, ValueError):
        return
    shapes, dtypes = [shape for shape, _ in args], {dtype for _, dtype in args}
    if [len(shape) for shape in shapes[1:3]] != [1, 1] or len(shapes) != 4 or len(shapes[0]) < 2 or len(dtypes) != 1:
        return
    (shape, dtype), (weights, _) = args[:2]
    groups = _groups(func)
    for is_last in (True, False):
        if shape[-1 if is_last else 1] != weights[0] or not groups or weights[0] % groups:
            continue
        for eps in _epsilons(func):
            spec = GroupNormSpec(shape, groups, is_last, eps, dtype, _activation(func))
            if args == [(shape, dtype) for _, shape, dtype in spec.arguments]:
                yield spec


def _groups(func: Any) -> int:
    """Return the second extent of the first intermediate, which has sums of groups; 0 for a function that has other ones."""
    buffers = func.body.block.alloc_buffers if isinstance(func.body, tvm.s_tir.SBlockRealize) else []
    shape = [int(extent) for extent in buffers[0].shape] if len(buffers) == 4 else []
    return shape[1] if len(shape) == 2 else 0


def _epsilons(func: Any) -> list[float]:
    """Return the constants that something under a root has added."""
    found: list[float] = []

    def note(call: Any) -> None:
        if getattr(call.op, "name", "") == "tirx.rsqrt" and isinstance(call.args[0], tirx.Add):
            found.extend(float(term.value) for term in (call.args[0].a, call.args[0].b) if isinstance(term, tirx.FloatImm))

    tvm_ffi.structural_map(func.body, [(tvm.ir.Call, note)], order="pre")
    return list(dict.fromkeys(found))


def _activation(func: Any) -> Activation:
    """Return the activation that a function's operators suggest."""
    names: set[str] = set()
    tvm_ffi.structural_map(func.body, [(tvm.ir.Call, lambda call: names.add(getattr(call.op, "name", "")))], order="pre")
    maxima: list[Any] = []
    tvm_ffi.structural_map(func.body, [(tirx.Max, maxima.append)], order="pre")
    return "silu" if "tirx.sigmoid" in names else "gelu" if "tirx.erf" in names else "relu" if maxima else ""
