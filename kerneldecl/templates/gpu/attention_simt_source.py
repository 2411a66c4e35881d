"""Owns what an attention's sizes, layout and biases make of the CUDA text of its kernel on CUDA cores.

Knows nothing of how parameters are chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kerneldecl.analysis.attention_simt import AttentionSimtParams, key_pitch, value_columns
from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.compiler.attention import FLOAT8, AttentionSpec
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.gpu.attention_simt_text import (
    ASYNC,
    CONSTANTS,
    COPIES,
    KERNEL,
    PRODUCTS,
    SOFTMAX,
    STORES,
    SUMS,
    THROUGH_REGISTERS,
)
from kerneldecl.templates.gpu.cuda_types import access_type, cuda_type, widened
from kerneldecl.templates.shared.fused_attention import LOG2_E

FUNCTION = "attention"


@dataclass(frozen=True)
class _Strides:
    """Elements between neighbours along the axes of an argument."""

    batch: int
    head: int
    row: int

    @classmethod
    def of(cls, spec: AttentionSpec, heads: int, rows: int, columns: int) -> _Strides:
        shape, names = spec.index(spec.batch, heads, rows, columns), spec.index("batch", "head", "row", "column")
        return cls(*(math.prod(shape[names.index(name) + 1 :]) for name in ("batch", "head", "row")))

    def named(self, name: str) -> dict[str, int]:
        return {f"{name}_batch": self.batch, f"{name}_head": self.head, f"{name}_row": self.row}


def attention_source(spec: AttentionSpec, params: AttentionSimtParams, *, is_async: bool) -> str:
    """Return the CUDA text of the kernel; `is_async` says that float32 is copied by cp.async."""
    is_async = is_async and spec.dtype == "float32"
    widths = {_width(spec, columns) for columns in (spec.head_dim, spec.value_dim)}
    copies = "".join(_copy(spec, width, is_async=is_async) for width in sorted(widths))
    return "".join(
        (_constants(spec, params, is_async=is_async), _bias_source(spec), COPIES, copies, SOFTMAX, PRODUCTS, STORES, _kernel(spec))
    )


def _width(spec: AttentionSpec, columns: int) -> int:
    """Return the elements of a row that a thread copies at once."""
    return math.gcd(columns, VECTOR_BYTES // dtype_bytes(spec.dtype))


def _copy(spec: AttentionSpec, width: int, *, is_async: bool) -> str:
    nbytes = width * dtype_bytes(spec.dtype)
    instruction = "cp.async.cg.shared.global" if nbytes == VECTOR_BYTES else "cp.async.ca.shared.global"
    template = ASYNC if is_async else THROUGH_REGISTERS
    return template.format(width=width, nbytes=nbytes, instruction=instruction, access=access_type(nbytes))


def _constants(spec: AttentionSpec, params: AttentionSimtParams, *, is_async: bool) -> str:
    has_bias = spec.sizes.has_bias
    return CONSTANTS.format(
        **params._asdict(),
        threads=params.threads,
        head_dim=spec.head_dim,
        value_dim=spec.value_dim,
        pitch=key_pitch(spec.head_dim),
        columns=value_columns(spec.value_dim),
        powers=params.power_pitch,
        queries=spec.queries,
        keys=spec.keys,
        heads=spec.heads,
        group=spec.group,
        all_heads=spec.batch * spec.heads,
        together=min(params.heads_together, spec.batch * spec.heads),
        has_upper=_bool(spec.band.upper is not None),
        has_lower=_bool(spec.band.lower is not None),
        is_async=_bool(is_async),
        has_bias=_bool(has_bias),
        upper=spec.band.upper or 0,
        lower=spec.band.lower or 0,
        scale=_float(spec.scale),
        scale_log2=_float((1.0 if has_bias else spec.scale) * LOG2_E),
        item=cuda_type(spec.dtype),
        out=cuda_type(spec.result_dtype),
        widen_items=widened(spec.dtype, "float32"),
        widen_outs=widened(spec.result_dtype, "float32"),
    )


def _bool(value: object) -> str:
    return "true" if value else "false"


def _float(value: float) -> str:
    return f"{value!r}f" if "." in repr(value) or "e" in repr(value) else f"{value!r}.0f"


def _bias_source(spec: AttentionSpec) -> str:
    """Return functions that scores go through before their softmax."""
    found = ""
    if spec.softcap:
        # As on tensor cores: cap tanh(x) = cap - 2 cap / (1 + exp(2 x)).
        found += f"""
__device__ __forceinline__ float capped(float score) {{
  float raised, inverse;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(raised) : "f"(score * {_float(2 * LOG2_E * spec.scale / spec.softcap)}));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + raised));
  return fmaf({_float(-2 * spec.softcap)}, inverse, {_float(spec.softcap)});
}}
"""
    if spec.mask and spec.bias_dtype != "bool":
        found += f"namespace masks {{ {widened(spec.bias_dtype, 'float32')} }}\n"
    return found


def _kernel(spec: AttentionSpec) -> str:
    is_packed = spec.layout == "packed"
    heads = spec.heads + 2 * spec.kv_heads if is_packed else spec.kv_heads
    q = _Strides.of(spec, heads if is_packed else spec.heads, spec.queries, spec.head_dim)
    k, v = (_Strides.of(spec, heads, spec.keys, columns) for columns in (spec.head_dim, spec.value_dim))
    return KERNEL.format(
        function=FUNCTION,
        parameters=", ".join(_parameter(name, dtype) for name, _, dtype in spec.arguments),
        **dict.fromkeys("qkv", "QKV") if is_packed else {"q": "Q", "k": "K", "v": "V"},
        k_first=spec.heads if is_packed else 0,
        v_first=spec.heads + spec.kv_heads if is_packed else 0,
        **q.named("q"),
        **k.named("k"),
        **v.named("v"),
        **_Strides.of(spec, spec.heads, spec.queries, spec.value_dim).named("o"),
        qk_width=_width(spec, spec.head_dim),
        v_width=_width(spec, spec.value_dim),
        bias=_bias(spec),
        value_scale="*v_scale" if spec.dtype == FLOAT8 else "1.0f",
        sums=SUMS if spec.has_logsumexp else "",
    )


def _parameter(name: str, dtype: str) -> str:
    if name == "O":
        return "Out* __restrict__ o"
    if name == "logsumexp":
        return "float* __restrict__ logsumexp"
    if name in {"slopes", "q_scale", "k_scale", "v_scale"}:
        return f"const float* __restrict__ {name}"
    if name == "mask":
        return f"const {'bool' if dtype == 'bool' else cuda_type(dtype)}* __restrict__ mask"
    return f"const Item* __restrict__ {name}"


def _bias(spec: AttentionSpec) -> str:
    """Return statements that cap, scale and bias a score; rows and keys beyond the last ones read the last one's mask."""
    lines = ["score *= *q_scale * *k_scale;"] if spec.dtype == FLOAT8 else []
    if not spec.sizes.has_bias:
        return " ".join(lines)
    lines.append("score = capped(score);" if spec.softcap else "score *= SCALE;")
    if spec.alibi is not None:
        lines.append(f"score -= slopes[head] * fabsf(static_cast<float>(at + {spec.alibi} - key));")
    if spec.mask:
        places = ("batch", "head", "min(at, QUERIES - 1)", "min(key, KEYS - 1)")[4 - len(spec.mask) :]
        index = "0LL"
        for extent, place in zip(spec.mask, places, strict=True):
            index = f"({index} * {extent} + {0 if extent == 1 else place})"
        masked = f"mask[{index}]"
        lines.append(f"if (!{masked}) score = -INFINITY;" if spec.bias_dtype == "bool" else f"score += masks::wide({masked});")
    return " ".join(lines)
