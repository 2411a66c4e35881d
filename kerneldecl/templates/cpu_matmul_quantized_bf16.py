"""Owns GEMMs of few rows of bfloat16 with weights of 4 or 8 bits on CPUs with AVX512-BF16: dot products of pairs along k.

Knows nothing of how its parameters are chosen, and recognises the computation as `cpu_matmul_quantized` does.

Weights are rounded to bfloat16 before they are multiplied: functions that keep them in float32 are left to `cpu_matmul_quantized`.

Parameters: those of `cpu_matmul_quantized`.

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

from collections.abc import Mapping

from tvm import IRModule
from tvm.ir import TensorLoad

from kerneldecl.analysis.cpu_features import has_bfloat16_dots
from kerneldecl.analysis.cpu_params import CpuQuantizedParams
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.bf16_weights import STEP
from kerneldecl.templates.cpu.gemm import read_gemm
from kerneldecl.templates.cpu.quantized_bf16_kernel import build
from kerneldecl.templates.cpu.quantized_kernel import QuantizedGemm
from kerneldecl.templates.cpu_matmul_quantized import read

DTYPE = "bfloat16"
"""Of A, and of what weights are rounded to."""


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the GEMM as one custom kernel; None where the target, dtypes or groups that are no whole vectors do not fit."""
    chosen = CpuQuantizedParams(**{name: params[name] for name in CpuQuantizedParams._fields})  # type: ignore[arg-type]
    if not has_bfloat16_dots(arch) or not chosen.fits():
        return None
    gemm = read_gemm(mod)
    found = read(gemm) if gemm is not None else None
    a = None if found is None else _position_of_a(found)
    if found is None or a is None or found.weight_dtype != DTYPE or found.group % STEP:
        return None
    return build(found, chosen, a)


def _position_of_a(gemm: QuantizedGemm) -> int | None:
    """Return the position of A among the arguments; None where it is computed, or of another dtype."""
    value, axes = gemm.a.value, gemm.a.axes
    if not isinstance(value, TensorLoad) or str(value.source.ty.dtype) != DTYPE or len(value.indices) != len(axes):
        return None
    if not all(index.same_as(axis) for index, axis in zip(value.indices, axes, strict=True)):
        return None
    return next((at for at, each in enumerate(gemm.args) if each.same_as(value.source)), None)
