"""Owns each rule's inputs on the GPU, its reference in float64 by torch, and how far a result is from it.

Knows nothing of rivals, kernels or timing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from bench_support.gpu.torch_places import PLACES
from bench_support.gpu.torch_rules import (
    BINARY,
    BINARY_GATES,
    EXPRESSIONS,
    FLOAT8,
    STEPS,
    UNARY,
    UNARY_INTO,
    WITH_OPERAND,
    Args,
    Attrs,
    Tensor,
    applied,
    as_nn,
    attention_scale,
    batch_norm,
    conv2d,
    cross_entropy,
    fused_norm,
    gated,
    gated_elements,
    group_norm,
    pool2d,
    reduce,
    rotary,
    scales_of,
    softmax,
)

from kerneldecl.rule import Arg, Rule


def dtype_of(arg: Arg) -> Any:
    return getattr(torch, arg.dtype)


def tensor_of(array: Any) -> Tensor:
    """Return an array as a tensor, also of dtypes that NumPy has of ml_dtypes."""
    name = array.dtype.name
    if name != "bfloat16" and not name.startswith("float8"):
        return torch.from_numpy(np.ascontiguousarray(array))
    bits = array.view(np.int16 if name == "bfloat16" else np.int8)
    return torch.from_numpy(np.ascontiguousarray(bits)).view(getattr(torch, name))


def inputs_of(rule_name: str, rule: Rule, attrs: Attrs, device: str = "cuda") -> list[Tensor]:
    """Return random inputs distributed as the rule's own: the second operand is scaled so that dot products have unit variance."""
    torch.manual_seed(0)
    if rule_name in PLACES or (device == "cpu" and rule_name == "matmul_quantized"):
        return [tensor_of(array).to(device) for array in rule.inputs(np.random.default_rng(0))]
    scaled = {"matmul": 1, "matmul_gated": 1, "matmul_grouped": 1, "conv2d": 1, "gemv": 0}.get(rule_name)
    args = rule.signature().inputs
    inputs = [_random(arg, device, _terms(rule_name, attrs) ** -0.5 if at == scaled else 1.0) for at, arg in enumerate(args)]
    if rule_name in _ADJUSTED:
        _ADJUSTED[rule_name](attrs, inputs)
    if rule_name == "matmul_grouped":
        _set_groups(rule, attrs, inputs)
    if attrs.get("precision") == "tfloat32":
        # TF32's 10 bits of mantissa: however a library rounds, it reads the same values.
        inputs[:2] = [(x.view(torch.int32) & -(2**13)).view(torch.float32) for x in inputs[:2]]
    return inputs


def _set_groups(rule: Any, attrs: Attrs, inputs: Sequence[Tensor]) -> None:
    """Give a grouped GEMM groups of random sizes, as the rule has them, and scales that are no noise."""
    for scale in inputs[1:-1:2] if attrs["dtype"] in FLOAT8 else ():
        scale.uniform_(0.5, 1.5)
    inputs[-1].copy_(torch.from_numpy(rule.sizes(np.random.default_rng(0))))


def _adjust_attention(attrs: Attrs, inputs: Args) -> None:
    """Make scales of float8 positive."""
    if attrs["dtype"] in FLOAT8:
        for scale in inputs[scales_of(attrs)]:
            scale.uniform_(0.5, 1.0)


def _adjust_decode(attrs: Attrs, inputs: Args) -> None:
    """Have every sequence see all keys, in pages that lie anywhere."""
    inputs[-1].fill_(attrs["keys"])
    if attrs["page_size"]:
        pages = torch.randperm(inputs[1].shape[0], device=inputs[1].device, dtype=torch.int32)
        inputs[-2].copy_(pages[: inputs[-2].numel()].view(inputs[-2].shape))


def _adjust_quantized(attrs: Attrs, inputs: Args) -> None:
    """Give blocks of 4-bit floats scales of size 1, none of them NaN: powers of two as bytes, or float8 and one float32."""
    if attrs["scale_dtype"] == "float8_e8m0fnu":
        inputs[2].random_(120, 128)
    elif attrs["scale_dtype"]:
        inputs[2].copy_(torch.rand(inputs[2].shape, device=inputs[2].device) + 0.5)


_ADJUSTED: Mapping[str, Callable[[Attrs, Args], object]] = {
    "gemv_i4": lambda _, inputs: inputs[1].uniform_(0.01, 0.1),
    "batch_norm": lambda _, inputs: inputs[2].abs_().add_(0.1),
    "cross_entropy": lambda attrs, inputs: inputs[1].random_(0, attrs["classes"]),
    "embedding": lambda attrs, inputs: inputs[1].random_(0, attrs["rows"]),
    "matmul_quantized": _adjust_quantized,
    "attention": _adjust_attention,
    "attention_decode": _adjust_decode,
}
"""By rule: what makes its random inputs ones that it takes."""


def _random(arg: Arg, device: str, scale: float = 1.0) -> Tensor:
    dtype = dtype_of(arg)
    if dtype.is_floating_point:
        # torch has no random numbers in float8.
        drawn = torch.float32 if dtype.itemsize == 1 else dtype
        return torch.randn(arg.shape, device=device, dtype=drawn).mul_(scale).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -128), min(info.max, 255) + 1, arg.shape, device=device, dtype=dtype)


def _terms(rule_name: str, attrs: Attrs) -> int:
    return int(attrs["kh"] * attrs["kw"] * attrs["c"] // attrs["groups"] if rule_name == "conv2d" else attrs["k"])


def relative_error(got: Tensor, want: Tensor, *, rows_vary: bool = False) -> float:
    """Return the largest |got - want| / (|want| + scale), as kerneldecl.arrays has it; infinity for a NaN.

    The scale is the root mean square of `want`, or with `rows_vary` that of the row where it is larger.
    """
    want = want.double()
    scale = want.square().mean().sqrt()
    if rows_vary:
        scale = want.square().mean(-1, keepdim=True).sqrt_().clamp_min_(scale)
    error = (got.double() - want).abs_() / (want.abs() + scale)
    largest = float(error.max())
    return math.inf if math.isnan(largest) else largest


def poison(out: Tensor) -> None:
    """Fill an output with values that no right kernel leaves."""
    out.fill_(math.nan if out.dtype.is_floating_point else 0x5A)


def reference(rule_name: str, attrs: Attrs, inputs: Args) -> Tensor:
    """Return what the rule's reference computes; raise KeyError for an unknown rule."""
    if rule_name == "conv2d" and (attrs["layout"] == "nchw" or attrs["strides"] or attrs["pads"] or attrs["dilations"]):
        raise KeyError("conv2d whose sides differ, or with channels first")
    if not all(step in STEPS or step in WITH_OPERAND for step in attrs.get("epilogue", ())):
        raise KeyError(f"{rule_name} with epilogue {attrs['epilogue']}")
    return _REFERENCES[rule_name](attrs, inputs)


def _matmul_reference(attrs: Attrs, inputs: Args) -> Tensor:
    a, b, *operands = (x.double() for x in inputs)
    a, b = as_nn(attrs, a, b)
    return applied(a @ b, attrs["epilogue"], operands)


def _gemv_reference(attrs: Attrs, inputs: Args) -> Tensor:
    w, x = (value.double() for value in inputs)
    return (w if attrs["layout"] == "n" else w.mT) @ x


def _gemv_i4_reference(attrs: Attrs, inputs: Args) -> Tensor:
    packed, scale, x = inputs
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return ((nibbles.double() - 8) * scale.double().repeat_interleave(attrs["group"], dim=1)) @ x.double()


def _conv2d_reference(attrs: Attrs, inputs: Args) -> Tensor:
    x, w, *operands = (value.double() for value in inputs)
    result = conv2d(attrs, x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1)).permute(0, 2, 3, 1)
    return applied(result, attrs["epilogue"], operands)


def _elementwise_reference(attrs: Attrs, inputs: Args) -> Tensor:
    op, wide = attrs["op"], [x.double() for x in inputs]
    if op in BINARY_GATES:
        return gated_elements(attrs, wide)
    if attrs["halves"]:
        wide = list(wide[0].chunk(2, -1))
    return (BINARY | UNARY_INTO | UNARY)[op](*wide)


ATTENTION_ROWS = 4096
"""Rows of queries whose scores the reference has in memory at once."""


def _attention_reference(attrs: Attrs, inputs: Args) -> Tensor:
    """Compute head by head: all scores in float64 would not fit. Of second results nothing is known here."""
    if attrs["logsumexp"]:
        raise NotImplementedError("attention with logsumexp")
    scales = inputs[scales_of(attrs)] if attrs["dtype"] in FLOAT8 else ()
    q_scale, k_scale, v_scale = (scale.double() for scale in scales) if scales else (1.0, 1.0, 1.0)
    q, k, v, *others = _attention_operands(attrs, inputs)
    others = others[len(scales) :]
    slopes = others.pop(0) if attrs["alibi"] else None
    mask = others.pop(0).expand(*q.shape[:3], k.shape[2]) if attrs["mask"] else None
    own = k.shape[2] - q.shape[2] if attrs["align"] == "end" else 0
    group = q.shape[1] // k.shape[1]
    out = torch.empty(*q.shape[:3], v.shape[3], device=q.device, dtype=torch.float64)
    for batch, head in itertools.product(range(q.shape[0]), range(q.shape[1])):
        for start in range(0, q.shape[2], ATTENTION_ROWS):
            rows = slice(start, min(start + ATTENTION_ROWS, q.shape[2]))
            scores = (q[batch, head, rows].double() @ k[batch, head // group].double().mT) * (attention_scale(attrs) * q_scale * k_scale)
            scores = attrs["softcap"] * torch.tanh(scores / attrs["softcap"]) if attrs["softcap"] else scores
            distance = torch.arange(k.shape[2], device=q.device) - torch.arange(rows.start, rows.stop, device=q.device)[:, None] - own
            if slopes is not None:
                scores -= slopes[head].double() * distance.abs()
            if mask is not None:
                added = mask[batch, head, rows]
                scores = scores.masked_fill(~added, -math.inf) if added.dtype == torch.bool else scores + added.double()
            if attrs["causal"]:
                scores.masked_fill_(distance > 0, -math.inf)
            if attrs["window"]:
                scores.masked_fill_(distance.abs() > attrs["window"], -math.inf)
            out[batch, head, rows] = torch.softmax(scores, -1).nan_to_num_() @ v[batch, head // group].double() * v_scale
    return out if attrs["layout"] == "bhsd" else out.transpose(1, 2)


def _attention_operands(attrs: Attrs, inputs: Args) -> list[Tensor]:
    """Return Q, K and V by batch, head, row and element, and the other inputs."""
    if attrs["layout"] == "packed":
        kv_heads = attrs["kv_heads"] or attrs["heads"]
        return [*(x.transpose(1, 2) for x in inputs[0].split((attrs["heads"], kv_heads, kv_heads), 2)), *inputs[1:-1]]
    return [*(x if attrs["layout"] == "bhsd" else x.transpose(1, 2) for x in inputs[:3]), *inputs[3:-1]]


def _attention_decode_reference(attrs: Attrs, inputs: Args) -> Tensor:
    """Compute one sequence after another, whose queries see all keys up to their own."""
    q, k = inputs[:2]
    v = k[..., : attrs["value_dim"] or None] if attrs["latent"] else inputs[2]
    q, k, v = (x if attrs["layout"] == "bhsd" else x.transpose(1, 2) for x in (q, k, v))
    found = []
    for sequence, length in enumerate(inputs[-1].tolist()):
        keys, values = (_sequence(attrs, inputs, x, sequence)[:, :length].double() for x in (k, v))
        rows = q[sequence].double().unflatten(0, (keys.shape[0], -1))
        scores = (rows @ keys[:, None].mT) * attention_scale(attrs)
        seen = torch.ones_like(scores, dtype=torch.bool).tril_(length - q.shape[2])
        found.append((torch.softmax(scores.masked_fill_(~seen, -math.inf), -1).nan_to_num_() @ values[:, None]).flatten(0, 1))
    out = torch.stack(found)
    return out if attrs["layout"] == "bhsd" else out.transpose(1, 2)


def _sequence(attrs: Attrs, inputs: Args, cache: Tensor, sequence: int) -> Tensor:
    """Return the rows of a sequence in a cache, [heads, keys, columns]."""
    if not attrs["page_size"]:
        return cache[sequence]
    return cache[inputs[-2][sequence].long()].transpose(0, 1).flatten(1, 2)


def _unscaled(attrs: Attrs, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B of a grouped GEMM in float32, with their scales of 128 elements and of 128 x 128 blocks."""
    rows = a_scale.repeat_interleave(128, -1)[..., : attrs["k"]]
    blocks = b_scale.repeat_interleave(128, -1).repeat_interleave(128, -2)[..., : attrs["n"], : attrs["k"]]
    return a.float() * rows, b.float() * blocks


def _matmul_grouped_reference(attrs: Attrs, inputs: Args) -> Tensor:
    """Compute one group after another; rows of no group are zero."""
    *operands, sizes = inputs
    a, b = operands if len(operands) == 2 else _unscaled(attrs, *operands)
    out = torch.zeros(*a.shape[:-1], attrs["n"], dtype=torch.float64, device=a.device)
    weights = b.mT if attrs["layout"] == "nt" else b
    begin = 0
    for group, size in enumerate(sizes.tolist()):
        rows = (group, slice(size)) if attrs["masked"] else slice(begin, size)
        out[rows] = a[rows].double() @ weights[group].double()
        begin = size
    return out


_REFERENCES: Mapping[str, Callable[[Attrs, Args], Tensor]] = {
    "matmul": _matmul_reference,
    "gemv": _gemv_reference,
    "gemv_i4": _gemv_i4_reference,
    "matmul_grouped": _matmul_grouped_reference,
    "conv2d": _conv2d_reference,
    "elementwise": _elementwise_reference,
    "reduce": lambda attrs, inputs: reduce(attrs, inputs[0].double()),
    "softmax": lambda attrs, inputs: softmax(attrs, *(x.double() for x in inputs)),
    "cross_entropy": lambda attrs, inputs: cross_entropy(attrs, inputs[0].double(), inputs[1]),
    "pool2d": lambda attrs, inputs: pool2d(attrs, inputs[0].double()),
    "batch_norm": lambda attrs, inputs: batch_norm(attrs, *(x.double() for x in inputs)),
    "embedding": lambda _, inputs: F.embedding(inputs[1], inputs[0]),
    "arg_reduce": lambda attrs, inputs: getattr(torch, attrs["op"])(inputs[0], attrs["axis"]),
    "expression": lambda attrs, inputs: EXPRESSIONS[attrs["expr"]](*(x.double() for x in inputs)),
    "matmul_gated": lambda attrs, inputs: gated(attrs, *(inputs[0].double() @ half.double().mT for half in inputs[1].chunk(2))),
    "layer_norm": lambda attrs, inputs: fused_norm("layer_norm", attrs, inputs, wide=torch.float64),
    "rms_norm": lambda attrs, inputs: fused_norm("rms_norm", attrs, inputs, wide=torch.float64),
    "transpose": lambda attrs, inputs: inputs[0].permute(attrs["axes"]),
    "group_norm": lambda attrs, inputs: group_norm(attrs, *(x.double() for x in inputs)),
    "rotary": lambda attrs, inputs: rotary(attrs, *(x.double() for x in inputs)),
    "attention": _attention_reference,
    "attention_decode": _attention_decode_reference,
    "topk": lambda attrs, inputs: torch.topk(inputs[0], attrs["k"], largest=attrs["largest"])[0],
    "sort": lambda attrs, inputs: torch.sort(inputs[0], descending=attrs["descending"])[0],
}
