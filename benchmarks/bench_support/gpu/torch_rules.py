"""Owns what torch computes for each rule as one call or a few, which references and rivals share.

Knows nothing of precision, timing or which calls are rivals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom

Attrs = Mapping[str, Any]
Tensor = Any
Args = Sequence[Tensor]
"""The arguments of one call: inputs, then the output."""
STEPS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu}
WITH_OPERAND: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"bias": torch.add, "add": torch.add}


def as_nn(attrs: Attrs, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B as views of [m, k] and [k, n]."""
    return a if attrs["layout"][0] == "n" else a.mT, b if attrs["layout"][1] == "n" else b.mT


def applied(result: Tensor, steps: Sequence[str], operands: Sequence[Tensor]) -> Tensor:
    """Return the result after each step, a kernel for each."""
    remaining = list(operands)
    for step in steps:
        result = STEPS[step](result) if step in STEPS else WITH_OPERAND[step](result, remaining.pop(0))
    return result


def conv2d(attrs: Attrs, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, w, bias, attrs["stride"], attrs["padding"], attrs["dilation"], attrs["groups"])


BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
UNARY_INTO: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""Functions that write to an output which they are given."""
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": torch.clone,
    "relu": torch.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hard_sigmoid": F.hardsigmoid,
    "hard_swish": F.hardswish,
}


def reduce(attrs: Attrs, x: Tensor, **options: Any) -> Tensor:
    function = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "mean": torch.mean}[attrs["op"]]
    return function(x, dim=tuple(attrs["axes"]), keepdim=attrs["keepdims"], **options)


def layer_norm(attrs: Attrs, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], gamma, beta, attrs["eps"])


def rms_norm(attrs: Attrs, x: Tensor, gamma: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], gamma, attrs["eps"])


LIMITS = {"float8_e4m3fn": 448.0, "int8": 127.0}
"""The largest number of a dtype that rows are quantised to."""


def fused_norm(norm: str, attrs: Attrs, inputs: Args, wide: Any = None) -> Any:
    """Return a norm with its residual and its quantised result, computed in their own dtype, or as a reference in a wide one."""
    added = (inputs[0] + inputs[1],) if attrs["residual"] else ()
    operands = (*added, *inputs[2:]) if added else tuple(inputs)
    x, *weights = operands if wide is None else tuple(each.to(wide) for each in operands)
    y = (layer_norm if norm == "layer_norm" else rms_norm)(attrs, x, *weights)
    if not attrs["out_dtype"]:
        return (y, *added) if added else y
    scale = y.abs().amax(-1, keepdim=True).clamp_min(1e-10) / LIMITS[attrs["out_dtype"]]
    quantized = y / scale
    if wide is None:
        quantized = (quantized.round() if attrs["out_dtype"] == "int8" else quantized).to(getattr(torch, attrs["out_dtype"]))
    return (quantized, *added, scale[..., 0].float())


GATES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
}


def gated(attrs: Attrs, first: Tensor, second: Tensor) -> Tensor:
    return GATES[attrs["gate"]](first) * second


def group_norm(attrs: Attrs, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    first = x if attrs["axis"] == 1 else x.movedim(-1, 1)
    found = F.group_norm(first, attrs["groups"], gamma, beta, attrs["eps"])
    found = STEPS[attrs["activation"]](found) if attrs["activation"] else found
    return found if attrs["axis"] == 1 else found.movedim(1, -1)


def rotary(attrs: Attrs, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what transformers' models compute, of heads before tokens."""
    if attrs["interleaved"]:
        raise KeyError("rotary with tokens before heads")
    if attrs["pairs"]:
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        low, high = x.chunk(2, -1)
        turned = torch.cat([-high, low], -1)
    return x * cos + turned * sin


def softmax(attrs: Attrs, x: Tensor, *masks: Tensor, **options: Any) -> Tensor:
    scores = x if attrs["scale"] == 1.0 else x * attrs["scale"]
    return torch.softmax(scores + masks[0] if masks else scores, attrs["axis"], **options)


def cross_entropy(attrs: Attrs, x: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(x, target.long(), ignore_index=attrs["ignore_index"], reduction="none")


def pool2d(attrs: Attrs, x: Tensor) -> Tensor:
    """Return what torch computes of images with channels first, wherever they are in memory."""
    first = x if attrs["layout"] == "nchw" else x.permute(0, 3, 1, 2)
    window = (attrs["kh"], attrs["kw"]), attrs["stride"], attrs["padding"]
    found = F.max_pool2d(first, *window) if attrs["op"] == "max" else F.avg_pool2d(first, *window, count_include_pad=attrs["count_padding"])
    return found if attrs["layout"] == "nchw" else found.permute(0, 2, 3, 1)


def batch_norm(attrs: Attrs, x: Tensor, mean: Tensor, variance: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    first = x.movedim(attrs["axis"], 1)
    found = F.batch_norm(first, mean, variance, gamma, beta, eps=attrs["eps"])
    return (STEPS[attrs["activation"]](found) if attrs["activation"] else found).movedim(1, attrs["axis"])


EXPRESSIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gelu(x) * y + 1": lambda x, y: F.gelu(x) * y + 1,
    "x * sigmoid(y) + x": lambda x, y: x * torch.sigmoid(y) + x,
    "where(x < y, -x / 2, max(x, y))": lambda x, y: torch.where(x < y, -x / 2, torch.maximum(x, y)),
    "exp(min(x, 1)) - abs(y)": lambda x, y: torch.exp(x.clamp_max(1)) - y.abs(),
}
"""What torch computes for the expressions that are drawn."""
BINARY_GATES = {"silu_mul": "silu", "gelu_mul": "gelu", "gelu_tanh_mul": "gelu_tanh"}


def gated_elements(attrs: Attrs, inputs: Args) -> Tensor:
    """Return an operation of two operands that gates, of two tensors or of the halves of one."""
    first, second = inputs[0].chunk(2, -1) if attrs["halves"] else inputs
    return GATES[BINARY_GATES[attrs["op"]]](first) * second


FLOAT8 = ("float8_e4m3fn",)
"""Data types of attention whose operands have scales."""


def scales_of(attrs: Attrs) -> slice:
    """Return where the scales of Q, K and V in float8 are among an attention's inputs."""
    first = 1 if attrs["layout"] == "packed" else 3
    return slice(first, first + 3)


def attention_scale(attrs: Attrs) -> float:
    return float(attrs["scale"] or attrs["head_dim"] ** -0.5)
