"""Owns each rule in torch: inputs on the GPU, the reference in float64, and the calls with which a user would compute it.

Knows nothing of kerneldecl's kernels or of timing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  torch's own custom
from bench_support.gpu.timing import Call

from kerneldecl.rule import Arg, Rule

Attrs = Mapping[str, Any]
Tensor = Any
Args = Sequence[Tensor]
"""The arguments of one call: inputs, then the output."""
Baselines = Mapping[str, Call]
"""Calls by name."""


def dtype_of(arg: Arg) -> Any:
    return getattr(torch, arg.dtype)


def inputs_of(rule_name: str, rule: Rule, attrs: Attrs, device: str = "cuda") -> list[Tensor]:
    """Return random inputs distributed as the rule's own: the second operand is scaled so that dot products have unit variance."""
    torch.manual_seed(0)
    scaled = {"matmul": 1, "conv2d": 1, "gemv": 0}.get(rule_name)
    args = rule.signature().inputs
    inputs = [_random(arg, device, _terms(rule_name, attrs) ** -0.5 if at == scaled else 1.0) for at, arg in enumerate(args)]
    if rule_name == "gemv_i4":
        inputs[1].uniform_(0.01, 0.1)
    if rule_name == "attention" and attrs["dtype"] in FLOAT8:
        for scale in inputs[_scales(attrs)]:
            scale.uniform_(0.5, 1.0)
    if rule_name == "attention_decode":
        inputs[-1].fill_(attrs["keys"])
        if attrs["page_size"]:
            pages = torch.randperm(args[1].shape[0], device=device, dtype=torch.int32)
            inputs[-2].copy_(pages[: inputs[-2].numel()].view(inputs[-2].shape))
    if attrs.get("precision") == "tfloat32":
        # TF32's 10 bits of mantissa: however a library rounds, it reads the same values.
        inputs[:2] = [(x.view(torch.int32) & -(2**13)).view(torch.float32) for x in inputs[:2]]
    return inputs


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


# References in float64


def reference(rule_name: str, attrs: Attrs, inputs: Args) -> Tensor:
    """Return what the rule's reference computes; raise KeyError for an unknown rule."""
    if not all(step in _STEPS or step in _WITH_OPERAND for step in attrs.get("epilogue", ())):
        raise KeyError(f"{rule_name} with epilogue {attrs['epilogue']}")
    return _REFERENCES[rule_name](attrs, inputs)


def _matmul_reference(attrs: Attrs, inputs: Args) -> Tensor:
    a, b, *operands = (x.double() for x in inputs)
    a, b = _as_nn(attrs, a, b)
    return _applied(a @ b, attrs["epilogue"], operands)


_STEPS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": F.gelu, "silu": F.silu}
_WITH_OPERAND: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"bias": torch.add, "add": torch.add}


def _as_nn(attrs: Attrs, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return A and B as views of [m, k] and [k, n]."""
    return a if attrs["layout"][0] == "n" else a.mT, b if attrs["layout"][1] == "n" else b.mT


def _gemv_reference(attrs: Attrs, inputs: Args) -> Tensor:
    w, x = (value.double() for value in inputs)
    return (w if attrs["layout"] == "n" else w.mT) @ x


def _gemv_i4_reference(attrs: Attrs, inputs: Args) -> Tensor:
    packed, scale, x = inputs
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return ((nibbles.double() - 8) * scale.double().repeat_interleave(attrs["group"], dim=1)) @ x.double()


def _conv2d_reference(attrs: Attrs, inputs: Args) -> Tensor:
    x, w, *operands = (value.double() for value in inputs)
    result = _conv2d(attrs, x.permute(0, 3, 1, 2), w.permute(3, 2, 0, 1)).permute(0, 2, 3, 1)
    return _applied(result, attrs["epilogue"], operands)


def _conv2d(attrs: Attrs, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, w, bias, attrs["stride"], attrs["padding"], attrs["dilation"], attrs["groups"])


def _elementwise_reference(attrs: Attrs, inputs: Args) -> Tensor:
    op, wide = attrs["op"], [x.double() for x in inputs]
    if op == "silu_mul":
        return F.silu(wide[0]) * wide[1]
    return (_BINARY | _UNARY_INTO | _UNARY)[op](*wide)


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": torch.clone,
    "relu": torch.relu,
    "relu6": F.relu6,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "hard_sigmoid": F.hardsigmoid,
    "hard_swish": F.hardswish,
}


def _reduce(attrs: Attrs, x: Tensor, **options: Any) -> Tensor:
    function = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "mean": torch.mean}[attrs["op"]]
    return function(x, dim=tuple(attrs["axes"]), keepdim=attrs["keepdims"], **options)


def _layer_norm(attrs: Attrs, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], gamma, beta, attrs["eps"])


def _rms_norm(attrs: Attrs, x: Tensor, gamma: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], gamma, attrs["eps"])


def _attention_reference(attrs: Attrs, inputs: Args) -> Tensor:
    """Compute head by head: all scores in float64 would not fit. Of second results nothing is known here."""
    if attrs["logsumexp"]:
        raise NotImplementedError("attention with logsumexp")
    scales = inputs[_scales(attrs)] if attrs["dtype"] in FLOAT8 else ()
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
            scores = (q[batch, head, rows].double() @ k[batch, head // group].double().mT) * (_attention_scale(attrs) * q_scale * k_scale)
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


def _scales(attrs: Attrs) -> slice:
    """Return where the scales of Q, K and V in float8 are among an attention's inputs."""
    first = 1 if attrs["layout"] == "packed" else 3
    return slice(first, first + 3)


FLOAT8 = ("float8_e4m3fn",)
"""Data types of attention whose operands have scales."""
ATTENTION_ROWS = 4096
"""Rows of queries whose scores the reference has in memory at once."""


def _attention_decode_reference(attrs: Attrs, inputs: Args) -> Tensor:
    """Compute one sequence after another, whose queries see all keys up to their own."""
    q, k = inputs[:2]
    v = k[..., : attrs["value_dim"] or None] if attrs["latent"] else inputs[2]
    q, k, v = (x if attrs["layout"] == "bhsd" else x.transpose(1, 2) for x in (q, k, v))
    found = []
    for sequence, length in enumerate(inputs[-1].tolist()):
        keys, values = (_sequence(attrs, inputs, x, sequence)[:, :length].double() for x in (k, v))
        rows = q[sequence].double().unflatten(0, (keys.shape[0], -1))
        scores = (rows @ keys[:, None].mT) * _attention_scale(attrs)
        seen = torch.ones_like(scores, dtype=torch.bool).tril_(length - q.shape[2])
        found.append((torch.softmax(scores.masked_fill_(~seen, -math.inf), -1).nan_to_num_() @ values[:, None]).flatten(0, 1))
    out = torch.stack(found)
    return out if attrs["layout"] == "bhsd" else out.transpose(1, 2)


def _sequence(attrs: Attrs, inputs: Args, cache: Tensor, sequence: int) -> Tensor:
    """Return the rows of a sequence in a cache, [heads, keys, columns]."""
    if not attrs["page_size"]:
        return cache[sequence]
    return cache[inputs[-2][sequence].long()].transpose(0, 1).flatten(1, 2)


def _attention_scale(attrs: Attrs) -> float:
    return float(attrs["scale"] or attrs["head_dim"] ** -0.5)


_REFERENCES: Mapping[str, Callable[[Attrs, Args], Tensor]] = {
    "matmul": _matmul_reference,
    "gemv": _gemv_reference,
    "gemv_i4": _gemv_i4_reference,
    "conv2d": _conv2d_reference,
    "elementwise": _elementwise_reference,
    "reduce": lambda attrs, inputs: _reduce(attrs, inputs[0].double()),
    "softmax": lambda attrs, inputs: torch.softmax(inputs[0].double(), attrs["axis"]),
    "layer_norm": lambda attrs, inputs: _layer_norm(attrs, *(x.double() for x in inputs)),
    "rms_norm": lambda attrs, inputs: _rms_norm(attrs, *(x.double() for x in inputs)),
    "transpose": lambda attrs, inputs: inputs[0].permute(attrs["axes"]),
    "group_norm": lambda attrs, inputs: _group_norm(attrs, *(x.double() for x in inputs)),
    "rotary": lambda attrs, inputs: _rotary(attrs, *(x.double() for x in inputs)),
    "attention": _attention_reference,
    "attention_decode": _attention_decode_reference,
}


# Baselines: torch's own kernels, cuBLAS, cuDNN


def baselines(rule_name: str, attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return calls that compute the same as the rule, by name; none for an unknown rule."""
    if attrs.get("epilogue") and rule_name == "matmul":
        return _epilogue_baselines(attrs, sets)
    found = _BASELINES.get(rule_name)
    return {} if found is None else found(attrs, sets)


def _epilogue_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return GEMM with an epilogue: a bias or a residual by cuBLAS, other steps by kernels of their own; and fused where it can."""
    steps = attrs["epilogue"]
    if not all(step in _STEPS or step in _WITH_OPERAND for step in steps):
        return {}
    is_fused = steps[0] in _WITH_OPERAND and not attrs["batch"] and attrs["dtype"] not in {"int8", "float8_e4m3fn", "float8_e5m2"}

    def kernels(i: int) -> Tensor:
        a, b, *operands, _ = sets[i]
        a, b = _as_nn(attrs, a, b)
        if is_fused:
            return _applied(torch.addmm(operands[0], a, b), steps[1:], operands[1:])
        return _applied(torch.matmul(a, b), steps, operands)

    found = {"two kernels": kernels}
    if is_fused and tuple(steps) in {("bias", "relu"), ("bias", "gelu")}:
        # cuBLAS has gelu with tanh, whose difference from gelu with erf hardly shows in 16 bits.
        def fused(i: int) -> Tensor:
            a, b, bias, _ = sets[i]
            return torch._addmm_activation(bias, *_as_nn(attrs, a, b), use_gelu=steps[1] == "gelu")  # noqa: SLF001  it has no other name

        found["fused"] = fused
    return found


def _applied(result: Tensor, steps: Sequence[str], operands: Sequence[Tensor]) -> Tensor:
    """Return the result after each step, a kernel for each."""
    remaining = list(operands)
    for step in steps:
        result = _STEPS[step](result) if step in _STEPS else _WITH_OPERAND[step](result, remaining.pop(0))
    return result


def _matmul_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    if attrs["dtype"].startswith("float8"):
        return _float8_baselines(attrs, sets)
    if attrs["dtype"] == "int8":
        return {"int_mm": lambda i: torch._int_mm(*_as_nn(attrs, *sets[i][:2]), out=sets[i][2])}  # noqa: SLF001  it has no other name
    # cuBLAS has float16 accumulators and TF32 inputs only where allowed: here as the rule declares.
    torch.backends.cuda.matmul.allow_fp16_accumulation = attrs["accum_dtype"] == "float16"
    torch.backends.cuda.matmul.allow_tf32 = attrs["precision"] == "tfloat32"

    def matmul(i: int) -> Tensor:
        a, b, out = sets[i]
        return torch.matmul(*_as_nn(attrs, a, b), out=out)

    return {"matmul": matmul}


def _float8_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    """Return cuBLAS's float8 GEMM without scales, with accumulators as precise as ours and with fast accumulation."""
    one = torch.ones((), device=sets[0][0].device)

    def scaled(i: int, *, is_fast: bool) -> Tensor:
        a, b, out = sets[i]
        return torch._scaled_mm(*_as_nn(attrs, a, b), one, one, out_dtype=out.dtype, use_fast_accum=is_fast)  # noqa: SLF001  it has no other name

    return {"scaled_mm": lambda i: scaled(i, is_fast=False), "scaled_mm fast accum": lambda i: scaled(i, is_fast=True)}


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
    if not all(step in _STEPS or step in _WITH_OPERAND for step in steps):
        return {}
    bias_first = bool(steps) and steps[0] == "bias"
    weights = [w.permute(3, 2, 0, 1) for _, w, *_ in sets]
    last = [w.contiguous(memory_format=torch.channels_last) for w in weights]

    def applied(i: int, y: Tensor) -> Tensor:
        """Return the result with channels last after the steps that are no part of the convolution."""
        return _applied(y.permute(0, 2, 3, 1), steps[bias_first:], sets[i][2 + bias_first : -1])

    def bias(i: int) -> Tensor | None:
        return sets[i][2] if bias_first else None

    def channels_last(i: int) -> Tensor:
        return applied(i, _conv2d(attrs, sets[i][0].permute(0, 3, 1, 2), last[i], bias(i)))

    def fused(i: int) -> Tensor:
        places = (attrs[name] for name in ("stride", "padding", "dilation"))
        x, window = sets[i][0].permute(0, 3, 1, 2), [[place] * 2 for place in places]
        return torch.cudnn_convolution_relu(x, last[i], bias(i), *window, attrs["groups"]).permute(0, 2, 3, 1)

    found = {"channels last": channels_last}
    if "add" not in steps:
        first = [(x.permute(0, 3, 1, 2).contiguous(), w.contiguous()) for (x, *_), w in zip(sets, weights, strict=True)]
        found["channels first"] = lambda i: applied(i, _conv2d(attrs, *first[i], bias(i)))
    return found | {"fused": fused} if tuple(steps) == ("bias", "relu") else found


_BINARY: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
}
_UNARY_INTO: dict[str, Callable[..., Tensor]] = {
    "neg": torch.neg,
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""Functions that write to an output which they are given."""


def _elementwise_baselines(attrs: Attrs, sets: Sequence[Args]) -> Baselines:
    op = attrs["op"]
    if op in _BINARY:
        return {op: lambda i: _BINARY[op](sets[i][0], sets[i][1], out=sets[i][2])}
    if op in _UNARY_INTO:
        return {op: lambda i: _UNARY_INTO[op](sets[i][0], out=sets[i][1])}
    if op == "copy":
        return {"copy_": lambda i: sets[i][1].copy_(sets[i][0])}
    if op == "silu_mul":
        return {"two kernels": lambda i: torch.mul(F.silu(sets[i][0]), sets[i][1], out=sets[i][2])}
    return {op: lambda i: _UNARY[op](sets[i][0])}


def _group_norm(attrs: Attrs, x: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    first = x if attrs["axis"] == 1 else x.movedim(-1, 1)
    found = F.group_norm(first, attrs["groups"], gamma, beta, attrs["eps"])
    found = _STEPS[attrs["activation"]](found) if attrs["activation"] else found
    return found if attrs["axis"] == 1 else found.movedim(1, -1)


def _rotary(attrs: Attrs, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return what transformers' models compute, of heads before tokens."""
    if attrs["interleaved"]:
        raise KeyError("rotary with tokens before heads")
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def _attention_backends(attrs: Attrs, sets: Sequence[Args], *, is_causal: bool) -> Baselines:
    """Return torch's fused attention of Q, K and V by each of its back ends; those that refuse it fail when they are called."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    is_bhsd, has_groups = attrs["layout"] == "bhsd", attrs["kv_heads"] not in {0, attrs["heads"]}

    def attend(i: int, backend: Any) -> Tensor:
        q, k, v = (x if is_bhsd else x.transpose(1, 2) for x in sets[i][:3])
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=_attention_scale(attrs), enable_gqa=has_groups)
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
        q_scale, k_scale, v_scale = args[_scales(attrs)]
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


_BASELINES: Mapping[str, Callable[[Attrs, Sequence[Args]], Baselines]] = {
    "matmul": _matmul_baselines,
    "gemv": _gemv_baselines,
    "gemv_i4": _gemv_i4_baselines,
    "conv2d": _conv2d_baselines,
    "elementwise": _elementwise_baselines,
    "reduce": lambda attrs, sets: {attrs["op"]: lambda i: _reduce(attrs, sets[i][0], out=sets[i][1])},
    "softmax": lambda attrs, sets: {"softmax": lambda i: torch.softmax(sets[i][0], attrs["axis"], out=sets[i][1])},
    "layer_norm": lambda attrs, sets: {"layer_norm": lambda i: _layer_norm(attrs, *sets[i][:-1])},
    "rms_norm": lambda attrs, sets: {"rms_norm": lambda i: _rms_norm(attrs, *sets[i][:-1])},
    "group_norm": lambda attrs, sets: {"group_norm": lambda i: _group_norm(attrs, *sets[i][:-1])},
    "rotary": lambda attrs, sets: {} if attrs["interleaved"] else {"five kernels": lambda i: _rotary(attrs, *sets[i][:-1])},
    "transpose": lambda attrs, sets: {"copy_": lambda i: sets[i][1].copy_(sets[i][0].permute(attrs["axes"]))},
    "attention": _attention_baselines,
    "attention_decode": _attention_decode_baselines,
}
