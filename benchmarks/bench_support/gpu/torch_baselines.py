"""Owns the calls with which a user would compute each rule in torch: its own kernels, cuBLAS, cuDNN.

Knows nothing of kerneldecl's kernels, references or timing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from bench_support.gpu.timing import Call
from bench_support.gpu.torch_places import PLACES, convolution
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

Baselines = Mapping[str, Call]
"""Calls by name."""


def baselines(rule_name: str, attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return calls that compute the same as the rule, by name; none for an unknown rule."""
    if attrs.get("epilogue") and rule_name == "matmul":
        return _epilogue_baselines(attrs, sets)
    found = _BASELINES.get(rule_name)
    return {} if found is None else found(attrs, sets)


def _epilogue_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return GEMM with an epilogue: a bias or a residual by cuBLAS, other steps by kernels of their own; and fused where it can."""
    steps = attrs["epilogue"]
    if not all(step in STEPS or step in WITH_OPERAND for step in steps):
        return {}
    is_fused = steps[0] in WITH_OPERAND and not attrs["batch"] and attrs["dtype"] not in {"int8", "float8_e4m3fn", "float8_e5m2"}

    def kernels(i: int) -> Tensor:
        a, b, *operands, _ = sets[i]
        a, b = as_nn(attrs, a, b)
        if is_fused:
            return applied(torch.addmm(operands[0], a, b), steps[1:], operands[1:])
        return applied(torch.matmul(a, b), steps, operands)

    found = {"two kernels": kernels}
    if is_fused and tuple(steps) in {("bias", "relu"), ("bias", "gelu")}:
        # cuBLAS has gelu with tanh, whose difference from gelu with erf hardly shows in 16 bits.
        def fused(i: int) -> Tensor:
            a, b, bias, _ = sets[i]
            return torch._addmm_activation(bias, *as_nn(attrs, a, b), use_gelu=steps[1] == "gelu")  # noqa: SLF001  it has no other name

        found["fused"] = fused
    return found


def _matmul_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    if attrs["dtype"].startswith("float8"):
        return _float8_baselines(attrs, sets)
    if attrs["dtype"] == "int8":
        return {"int_mm": lambda i: torch._int_mm(*as_nn(attrs, *sets[i][:2]), out=sets[i][2])}  # noqa: SLF001  it has no other name
    if attrs["dtype"] == "uint8":
        return {}
    # cuBLAS has float16 accumulators and TF32 inputs only where allowed: here as the rule declares.
    torch.backends.cuda.matmul.allow_fp16_accumulation = attrs["accum_dtype"] == "float16"
    torch.backends.cuda.matmul.allow_tf32 = attrs["precision"] == "tfloat32"

    def matmul(i: int) -> Tensor:
        a, b, out = sets[i]
        return torch.matmul(*as_nn(attrs, a, b), out=out)

    return {"matmul": matmul}


def _float8_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return cuBLAS's float8 GEMM without scales, with accumulators as precise as ours and with fast accumulation."""
    one = torch.ones((), device=sets[0][0].device)

    def scaled(i: int, *, is_fast: bool) -> Tensor:
        a, b, out = sets[i]
        return torch._scaled_mm(*as_nn(attrs, a, b), one, one, out_dtype=out.dtype, use_fast_accum=is_fast)  # noqa: SLF001  it has no other name

    return {"scaled_mm": lambda i: scaled(i, is_fast=False), "scaled_mm fast accum": lambda i: scaled(i, is_fast=True)}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as torch.compile makes it when it is first called: importing the compiler takes seconds."""

    @functools.cache
    def made() -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
        return compiled

    def call(*given: Any) -> Any:
        return made()(*given)

    return call


def _own_and_compiled(function: Callable[..., Tensor], sets: Sequence[Args]) -> Baselines:
    """Return a function of a call's inputs as torch's own kernels, and as those of torch.compile."""
    compiled = _compiled(function)
    return {"eager": lambda i: function(*sets[i][:-1]), "compile": lambda i: compiled(*sets[i][:-1])}


def _softmax_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    if attrs["mask"] or attrs["scale"] != 1.0:
        return _own_and_compiled(functools.partial(softmax, attrs), sets)
    return {"softmax": lambda i: torch.softmax(sets[i][0], attrs["axis"], out=sets[i][1])}


def _gated_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return two GEMMs of cuBLAS, or one of both weights, and one kernel by torch.compile that gates; and what eager does."""
    gate = _compiled(functools.partial(gated, attrs))

    def two(i: int, gating: Callable[..., Tensor] = gate) -> Tensor:
        a, b, _ = sets[i]
        return gating(*(a @ half.mT for half in b.chunk(2)))

    def joined(i: int) -> Tensor:
        a, b, _ = sets[i]
        return gate(*(a @ b.mT).chunk(2, -1))

    return {"two GEMMs, compiled gate": two, "one GEMM, compiled gate": joined, "eager": lambda i: two(i, functools.partial(gated, attrs))}


def _norm_baselines(norm: str, attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return torch's own kernels and, where there are several, one by torch.compile."""
    outputs = 1 + attrs["residual"] + bool(attrs["out_dtype"])

    def eager(i: int) -> Any:
        return fused_norm(norm, attrs, sets[i][:-outputs])

    if outputs == 1:
        return {norm: eager}
    compiled = _compiled(lambda *inputs: fused_norm(norm, attrs, inputs))
    return {"eager": eager, "compile": lambda i: compiled(*sets[i][:-outputs])}


def _gemv_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    def wide(w: Tensor) -> Tensor:
        return w if attrs["layout"] == "n" else w.mT

    return {
        "mv": lambda i: torch.mv(wide(sets[i][0]), sets[i][1], out=sets[i][2]),
        "linear": lambda i: F.linear(sets[i][1][None], wide(sets[i][0]))[0],
    }


def _gemv_i4_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return torch's GEMV with 4-bit weights, which takes only bfloat16 and its own weight layout."""
    group, inner_tiles = attrs["group"], 8
    pack, multiply = torch.ops.aten._convert_weight_to_int4pack, torch.ops.aten._weight_int4pack_mm  # noqa: SLF001  it has no other name
    held = []
    for packed, scale, x, _ in sets:
        swapped = (packed << 4) | (packed >> 4)
        scale_and_zero = torch.stack([scale.mT, torch.zeros_like(scale.mT)], dim=-1).contiguous().bfloat16()
        held.append((x[None].bfloat16(), pack(swapped, inner_tiles), scale_and_zero))
    return {"int4 in bfloat16": lambda i: multiply(held[i][0], held[i][1], group, held[i][2])[0]}


def _conv2d_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return cuDNN's fastest algorithm, on channels last (the rule's layout, without a copy) and first; epilogues fused where it can."""
    steps = attrs["epilogue"]
    if attrs["layout"] == "nchw" or attrs["strides"] or attrs["pads"] or attrs["dilations"]:
        return convolution(attrs, sets)
    if not all(step in STEPS or step in WITH_OPERAND for step in steps):
        return {}
    bias_first = bool(steps) and steps[0] == "bias"
    weights = [w.permute(3, 2, 0, 1) for _, w, *_ in sets]
    last = [w.contiguous(memory_format=torch.channels_last) for w in weights]

    def with_steps(i: int, y: Tensor) -> Tensor:
        """Return the result with channels last after the steps that are no part of the convolution."""
        return applied(y.permute(0, 2, 3, 1), steps[bias_first:], sets[i][2 + bias_first : -1])

    def bias(i: int) -> Tensor | None:
        return sets[i][2] if bias_first else None

    def channels_last(i: int) -> Tensor:
        return with_steps(i, conv2d(attrs, sets[i][0].permute(0, 3, 1, 2), last[i], bias(i)))

    def fused(i: int) -> Tensor:
        places = (attrs[name] for name in ("stride", "padding", "dilation"))
        x, window = sets[i][0].permute(0, 3, 1, 2), [[place] * 2 for place in places]
        return torch.cudnn_convolution_relu(x, last[i], bias(i), *window, attrs["groups"]).permute(0, 2, 3, 1)

    found = {"channels last": channels_last}
    if "add" not in steps:
        first = [(x.permute(0, 3, 1, 2).contiguous(), w.contiguous()) for (x, *_), w in zip(sets, weights, strict=True)]
        found["channels first"] = lambda i: with_steps(i, conv2d(attrs, *first[i], bias(i)))
    return found | {"fused": fused} if tuple(steps) == ("bias", "relu") else found


def _elementwise_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    op = attrs["op"]
    if op in BINARY:
        return {op: lambda i: BINARY[op](sets[i][0], sets[i][1], out=sets[i][2])}
    if op in UNARY_INTO:
        return {op: lambda i: UNARY_INTO[op](sets[i][0], out=sets[i][1])}
    if op == "copy":
        return {"copy_": lambda i: sets[i][1].copy_(sets[i][0])}
    if op in BINARY_GATES:
        compiled = _compiled(functools.partial(gated_elements, attrs))
        return {"two kernels": lambda i: gated_elements(attrs, sets[i][:-1]), "compile": lambda i: compiled(sets[i][:-1])}
    if attrs["halves"]:
        return {op: lambda i: BINARY[op](*sets[i][0].chunk(2, -1), out=sets[i][1])}
    return {op: lambda i: UNARY[op](sets[i][0])}


def _attention_backends(attrs: Attrs, sets: Sequence[Args], *, is_causal: bool) -> Baselines:
    """Return torch's fused attention of Q, K and V by each of its back ends; those that refuse it fail when they are called."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    is_bhsd, has_groups = attrs["layout"] == "bhsd", attrs["kv_heads"] not in {0, attrs["heads"]}

    def attend(i: int, backend: Any) -> Tensor:
        q, k, v = (x if is_bhsd else x.transpose(1, 2) for x in sets[i][:3])
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=attention_scale(attrs), enable_gqa=has_groups)
        return out if is_bhsd else out.transpose(1, 2)

    if not sets[0][0].is_cuda:
        return {"flash": lambda i: attend(i, [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])}
    return {
        "cudnn": lambda i: attend(i, SDPBackend.CUDNN_ATTENTION),
        "flash": lambda i: attend(i, SDPBackend.FLASH_ATTENTION),
        "efficient": lambda i: attend(i, SDPBackend.EFFICIENT_ATTENTION),
    }


def _in_bfloat16(attrs: Attrs, sets: Sequence[Args]) -> Sequence[Args]:
    """Return Q, K and V in float8 as bfloat16, their scales multiplied in."""
    found = []
    for args in sets:
        q, k, v = (x.bfloat16() for x in args[:3])
        q_scale, k_scale, v_scale = args[scales_of(attrs)]
        found.append([q * (q_scale * k_scale).bfloat16(), k, v * v_scale.bfloat16()])
    return found


def _attention_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return torch's fused attention; none of those that it does not have. It has none of float8, and reads the same values in bfloat16."""
    is_square = attrs["keys"] in {0, attrs["queries"]}
    biases = ("mask", "window", "alibi", "softcap", "logsumexp", "out_dtype")
    # torch's causal mask is aligned to the first query and key.
    if any(attrs[name] for name in biases) or attrs["layout"] == "packed" or (attrs["causal"] and not is_square):
        return {}
    if attrs["dtype"] in FLOAT8:
        found = _attention_backends(attrs, _in_bfloat16(attrs, sets), is_causal=attrs["causal"])
        return {f"{name} in bfloat16": call for name, call in found.items()}
    return _attention_backends(attrs, sets, is_causal=attrs["causal"])


def _attention_decode_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return torch's fused attention for one query against a contiguous cache, all of which it sees; torch has no other."""
    if attrs["page_size"] or attrs["latent"] or attrs["queries"] > 1:
        return {}
    return _attention_backends(attrs, sets, is_causal=False)


def _matmul_grouped_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return torch's grouped GEMM, which is for bfloat16, and on CPUs a GEMM for each group; with places for each group all of them."""
    if attrs["dtype"].startswith("float8") or attrs["out_dtype"] not in ("", attrs["dtype"]):
        return {}

    def weights(i: int) -> Tensor:
        return sets[i][1].mT if attrs["layout"] == "nt" else sets[i][1]

    def each(i: int) -> Tensor:
        out, begin = sets[i][-1].zero_(), 0
        for group, size in enumerate(sets[i][-2].tolist()):
            rows = (group, slice(size)) if attrs["masked"] else slice(begin, size)
            torch.mm(sets[i][0][rows], weights(i)[group], out=out[rows])
            begin = size
        return out

    found: dict[str, Call] = {} if sets[0][0].is_cuda else {"a GEMM each": each}
    if attrs["masked"]:
        found["bmm of all places"] = lambda i: torch.bmm(sets[i][0], weights(i), out=sets[i][-1])
    elif attrs["dtype"] == "bfloat16":
        found["_grouped_mm"] = lambda i: torch._grouped_mm(sets[i][0], weights(i), offs=sets[i][2])  # noqa: SLF001  torch 2.11 has no other name
    return found


def _matmul_quantized_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return torch's GEMM of weights that were dequantised before, and those of its own quantised ones that CPUs have."""
    if sets[0][0].is_cuda or attrs["epilogue"] or attrs["zero_points"] or attrs["layout"] == "packed":
        return {}
    if attrs["weights"] == "int4" and attrs["scales"] == "group" and attrs["dtype"] in {"bfloat16", "float16"}:
        return _int4_baselines(attrs, sets)
    if attrs["weights"] == "float4_e2m1fn" and attrs["dtype"] in {"bfloat16", "float16"}:
        return _float4_baselines(attrs, sets)
    if attrs["weights"] == attrs["dtype"] == "int8" and attrs["scales"] == "column" and attrs["activation_scales"] == "token":
        return {"int_mm, then scales": lambda i: _scaled_int_mm(*sets[i])}
    return {}


def _int4_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    pack, multiply = torch.ops.aten._convert_weight_to_int4pack_for_cpu, torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001
    held = []
    for a, packed, scale, _ in sets:
        values = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).int()
        wide = ((values - 8).float() * scale.float().mT.repeat_interleave(attrs["group"], dim=1)).to(a.dtype)
        held.append((a, wide, pack(values, 1), torch.stack([scale, torch.zeros_like(scale)], dim=-1).contiguous()))
    return {
        "dequantised before": lambda i: F.linear(held[i][0], held[i][1]),
        "int4": lambda i: multiply(held[i][0], held[i][2], attrs["group"], held[i][3]),
    }


def _float4_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return torch's GEMM of blocks of 4-bit floats that were dequantised before: CPUs have none of their own."""
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    held = []
    for a, packed, scale, *of_tensor, _ in sets:
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
        is_power = attrs["scale_dtype"] == "float8_e8m0fnu"
        factors = torch.exp2(scale.float() - 127) if is_power else scale.float() * math.prod(each.item() for each in of_tensor)
        wide = torch.cat([numbers, -numbers])[codes] * factors.mT.repeat_interleave(attrs["group"], dim=1)
        held.append((a, wide.to(a.dtype)))
    return {"dequantised before": lambda i: F.linear(*held[i])}


def _scaled_int_mm(a: Tensor, w: Tensor, scales: Tensor, of_rows: Tensor, out: Tensor) -> Tensor:
    return torch.mul(torch._int_mm(a, w.mT) * scales, of_rows[:, None], out=out)  # noqa: SLF001  it has no other name


_BASELINES: Mapping[str, Callable[[Attrs, Sequence[Args]], Baselines]] = {
    "matmul": _matmul_baselines,
    "matmul_grouped": _matmul_grouped_baselines,
    "matmul_quantized": _matmul_quantized_baselines,
    "gemv": _gemv_baselines,
    "gemv_i4": _gemv_i4_baselines,
    "conv2d": _conv2d_baselines,
    "elementwise": _elementwise_baselines,
    "reduce": lambda attrs, sets: {attrs["op"]: lambda i: reduce(attrs, sets[i][0], out=sets[i][1])},
    "softmax": _softmax_baselines,
    "cross_entropy": lambda attrs, sets: _own_and_compiled(functools.partial(cross_entropy, attrs), sets),
    "pool2d": lambda attrs, sets: {attrs["op"]: lambda i: pool2d(attrs, sets[i][0])},
    "batch_norm": lambda attrs, sets: _own_and_compiled(functools.partial(batch_norm, attrs), sets),
    "embedding": lambda _, sets: {"embedding": lambda i: F.embedding(sets[i][1], sets[i][0])},
    "arg_reduce": lambda attrs, sets: {attrs["op"]: lambda i: getattr(torch, attrs["op"])(sets[i][0], attrs["axis"])},
    "expression": lambda attrs, sets: _own_and_compiled(EXPRESSIONS[attrs["expr"]], sets) if attrs["expr"] in EXPRESSIONS else {},
    "matmul_gated": _gated_baselines,
    "layer_norm": functools.partial(_norm_baselines, "layer_norm"),
    "rms_norm": functools.partial(_norm_baselines, "rms_norm"),
    "group_norm": lambda attrs, sets: {"group_norm": lambda i: group_norm(attrs, *sets[i][:-1])},
    "rotary": lambda attrs, sets: {} if attrs["interleaved"] else _own_and_compiled(functools.partial(rotary, attrs), sets),
    "transpose": lambda attrs, sets: {"copy_": lambda i: sets[i][1].copy_(sets[i][0].permute(attrs["axes"]))},
    "attention": _attention_baselines,
    "attention_decode": _attention_decode_baselines,
    **PLACES,
}
