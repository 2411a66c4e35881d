"""Schedules for mma.sync compute what rules do, instruction by instruction, with each lane's fragments in arrays of its own."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
from emulation import Kernel
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY
from support.thinned import only

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import cuda_source, reworked
from kerneldecl.compiler.passes.registers import narrowed
from kerneldecl.model import Arch, Candidate, Value
from kerneldecl.plugins.load import load_arch, load_rule

ROOT = REPOSITORY
H200 = load_arch(ROOT, "h200")
GEMM: dict[str, Value] = {"block_m": 32, "block_n": 48, "block_k": 32, "warps_m": 2, "warps_n": 1, "stages": 2, "raster_group": 1}
DOUBLE_BUFFERED: dict[str, Value] = {"double_buffer": 1, "stages": 3}
DOUBLE_8: dict[str, Value] = {**DOUBLE_BUFFERED, "block_k": 64}
SMEM_8: dict[str, Value] = {"block_k": 16, "smem_epilogue": 1}
CONV: dict[str, Value] = {"rows": 2, "columns": 16, "block_n": 32, "warps_rows": 1, "warps_columns": 1, "warps_n": 2}
FAST_FORMS = ("float64, tt, odd sizes",)
CASES: dict[str, tuple[str, dict[str, Any], str, dict[str, Value]]] = {
    "nt": ("matmul", {"m": 64, "n": 96, "k": 128, "layout": "nt"}, "gpu_matmul_tc", {**GEMM, "smem_epilogue": 0, "split_k": 1}),
    "odd sizes, tn": (
        "matmul",
        {"m": 40, "n": 50, "k": 72, "layout": "tn", "dtype": "bfloat16", "epilogue": ["bias", "relu"]},
        "gpu_matmul_tc",
        {**GEMM, "smem_epilogue": 1, "split_k": 1},
    ),
    "gated, odd sizes": (
        "matmul_gated",
        {"m": 40, "n": 25, "k": 72, "dtype": "float16"},
        "gpu_matmul_tc",
        {**GEMM, "smem_epilogue": 1, "split_k": 1},
    ),
    "gated, split-K": (
        "matmul_gated",
        {"m": 64, "n": 48, "k": 128, "gate": "gelu", "dtype": "bfloat16"},
        "gpu_matmul_tc",
        {**GEMM, "smem_epilogue": 0, "split_k": 2},
    ),
    "scores of interleaved heads": (
        "matmul",
        {"m": 40, "n": 50, "k": 64, "batch": 2, "heads": 2, "layout": "nt", "interleaved": "ab", "epilogue": ["scale"]},
        "gpu_matmul_tc",
        {**GEMM, "smem_epilogue": 0, "split_k": 1},
    ),
    "context of interleaved heads": (
        "matmul",
        {"m": 40, "n": 64, "k": 72, "batch": 2, "heads": 2, "layout": "nn", "interleaved": "bc"},
        "gpu_matmul_tc",
        {**GEMM, "smem_epilogue": 1, "split_k": 1},
    ),
    "double buffering": (
        "matmul",
        {"m": 64, "n": 96, "k": 256, "layout": "nn"},
        "gpu_matmul_tc",
        {**GEMM, **DOUBLE_BUFFERED, "split_k": 1, "smem_epilogue": 0},
    ),
    "double buffering, odd sizes, split-K": (
        "matmul",
        {"m": 40, "n": 50, "k": 520, "layout": "tt", "epilogue": ["bias"]},
        "gpu_matmul_tc",
        {**GEMM, **DOUBLE_BUFFERED, "block_k": 64, "stages": 4, "split_k": 2, "smem_epilogue": 0},
    ),
    "double buffering, element by element": (
        "matmul",
        {"m": 40, "n": 49, "k": 131, "layout": "nt"},
        "gpu_matmul_tc",
        {**GEMM, **DOUBLE_BUFFERED, "split_k": 1, "smem_epilogue": 1},
    ),
    "double buffering, a convolution": (
        "conv2d",
        {"n": 2, "h": 9, "w": 7, "c": 24, "f": 40, "kh": 3, "kw": 3, "padding": 1},
        "gpu_matmul_tc",
        {**GEMM, **DOUBLE_BUFFERED, "block_k": 64, "split_k": 1, "smem_epilogue": 0},
    ),
    "4-bit weights in rows": (
        "matmul_quantized",
        {"m": 48, "n": 96, "k": 128, "group": 32, "dtype": "float16", "layout": "rows"},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 0},
    ),
    "packed 4-bit weights with zero points, odd rows": (
        "matmul_quantized",
        {"m": 33, "n": 96, "k": 128, "zero_points": True, "dtype": "bfloat16", "layout": "packed"},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 1},
    ),
    "8-bit weights": (
        "matmul_quantized",
        {"m": 64, "n": 96, "k": 128, "weights": "int8", "scales": "column", "dtype": "float16"},
        "gpu_matmul_tc",
        {**GEMM, **DOUBLE_BUFFERED, "block_k": 64, "split_k": 1, "smem_epilogue": 0},
    ),
    "float8 weights": (
        "matmul_quantized",
        {"m": 40, "n": 50, "k": 128, "weights": "float8_e4m3fn", "scales": "block", "dtype": "float16", "epilogue": ["bias"]},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 0},
    ),
    "4-bit floats with powers of two, odd rows": (
        "matmul_quantized",
        {"m": 33, "n": 96, "k": 128, "weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32, "dtype": "bfloat16"},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 1},
    ),
    "packed 4-bit floats with float8 scales and one of the tensor": (
        "matmul_quantized",
        {
            "m": 48,
            "n": 96,
            "k": 128,
            "weights": "float4_e2m1fn",
            "scale_dtype": "float8_e4m3fn",
            "group": 16,
            "tensor_scale": True,
            "dtype": "float16",
            "layout": "packed",
        },
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 0},
    ),
    "convolution": (
        "conv2d",
        {"n": 1, "h": 16, "w": 32, "c": 3, "f": 32, "kh": 5, "kw": 5, "stride": 2, "padding": 2},
        "gpu_conv2d_tc",
        {**CONV, "smem_epilogue": 0},
    ),
    "causal conv1d": (
        "conv1d",
        {"n": 2, "w": 37, "c": 24, "f": 40, "kw": 3, "pads": [2, 0], "epilogue": ["bias", "relu"]},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 0},
    ),
    "conv3d": (
        "conv3d",
        {"n": 1, "d": 4, "h": 5, "w": 6, "c": 16, "f": 40, "kd": 3, "kh": 2, "kw": 3, "padding": 1, "stride": 2},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 1},
    ),
    "channels first": (
        "conv2d",
        {"n": 2, "h": 9, "w": 7, "c": 24, "f": 40, "kh": 3, "kw": 3, "padding": 1, "layout": "nchw", "epilogue": ["bias", "add"]},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 0},
    ),
    "sides that differ": (
        "conv2d",
        {"n": 2, "h": 9, "w": 17, "c": 24, "f": 40, "kh": 3, "kw": 2, "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2]},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 0},
    ),
    "transposed": (
        "conv2d_transpose",
        {"n": 1, "h": 5, "w": 6, "c": 24, "f": 40, "kh": 4, "kw": 3, "stride": 2, "padding": 1},
        "gpu_matmul_tc",
        {**GEMM, "split_k": 1, "smem_epilogue": 0},
    ),
}

FORMS: dict[str, tuple[str, dict[str, Any], str, dict[str, Value]]] = {
    "int8, nn": ("a100-80gb", {"layout": "nn", "dtype": "int8"}, "m16n8k32.row.col.s32.s8", {}),
    "int8, tn": ("a100-80gb", {"layout": "tn", "dtype": "int8", "m": 32, "n": 40}, "m16n8k32.row.col.s32.s8", {"smem_epilogue": 1}),
    "int8, tt, odd sizes": ("a100-80gb", {"layout": "tt", "dtype": "int8", "m": 45, "n": 50, "k": 70}, "m16n8k32.row.col.s32.s8", {}),
    "uint8, nt": ("a100-80gb", {"layout": "nt", "dtype": "uint8"}, "m16n8k32.row.col.s32.u8", {}),
    "uint8, nn, double buffering": ("a100-80gb", {"layout": "nn", "dtype": "uint8", "k": 256}, "m16n8k32.row.col.s32.u8", DOUBLE_8),
    "float8, nt": ("l4", {"layout": "nt", "dtype": "float8_e4m3fn", "out_dtype": "float16"}, "m16n8k32.row.col.f32.e4m3", {}),
    "float8, tn": ("l4", {"layout": "tn", "dtype": "float8_e5m2", "out_dtype": "float16"}, "m16n8k32.row.col.f32.e5m2", {}),
    "float64, nn": ("a100-80gb", {"layout": "nn", "dtype": "float64"}, "m8n8k4.row.col.f64", {"block_k": 16}),
    "float64, tt, odd sizes": ("a100-80gb", {"layout": "tt", "dtype": "float64", "m": 45, "n": 50, "k": 37}, "m8n8k4.row.col.f64", SMEM_8),
    "float16 without cp.async": ("t4", {"layout": "tt", "dtype": "float16"}, "m16n8k8.row.col.f32.f16", {}),
    "float16 accumulators": ("t4", {"layout": "nn", "dtype": "float16", "accum_dtype": "float16"}, "m16n8k8.row.col.f16.f16", {}),
    "int8 without cp.async": ("t4", {"layout": "nt", "dtype": "int8"}, "m8n8k16.row.col.s32.s8", {}),
    "uint8 without cp.async": ("t4", {"layout": "nn", "dtype": "uint8", "k": 72}, "m8n8k16.row.col.s32.u8", {"smem_epilogue": 1}),
}
"""Instructions of other dtypes and of older GPUs: arch, attributes, what stands in the PTX, parameters."""


def made(rule: Any, template: str, params: dict[str, Value], arch: Arch = H200) -> tvm.IRModule:
    applied = apply_candidate(ROOT, canonical.lower(rule), Candidate.of(template, params), arch)
    assert applied is not None
    return applied.mod


@needs_nvcc
@pytest.mark.parametrize(
    "name",
    only(("double buffering, odd sizes, split-K", "convolution"), CASES),
)
def test_computes_what_the_rule_does(name: str) -> None:
    kind, attrs, template, params = CASES[name]
    rule = load_rule(ROOT, kind).of(ROOT, {"dtype": "float16", **attrs})
    _computes(rule, narrowed(made(rule, template, params)), "mma.sync")


@needs_nvcc
@pytest.mark.parametrize("name", only(FAST_FORMS, FORMS))
def test_other_instructions_compute_what_the_rule_does(name: str) -> None:
    arch, attrs, instruction, params = FORMS[name]
    rule = load_rule(ROOT, "matmul").of(ROOT, {"m": 64, "n": 96, "k": 128, **attrs})
    mod = made(rule, "gpu_matmul_tc", {**GEMM, "smem_epilogue": 0, "split_k": 1, **params}, load_arch(ROOT, arch))
    _computes(rule, narrowed(mod), f"mma.sync.aligned.{instruction}")


def _computes(rule: Any, mod: tvm.IRModule, instruction: str) -> None:
    kernel = Kernel(mod["main"], reworked)
    assert instruction in kernel.source
    [out] = rule.signature().outputs
    inputs = rule.inputs(np.random.default_rng(1))
    result = kernel(*inputs, np.zeros(out.shape, getattr(ml_dtypes, out.dtype, out.dtype)))[-1].astype("float64")
    expected = np.asarray(rule.reference(*inputs))
    assert np.linalg.norm(result - expected) <= rule.tolerance() * np.linalg.norm(expected)


@pytest.mark.slow
@needs_nvcc
def test_as_many_accumulators_as_registers_hold_stay_in_them() -> None:
    attrs = {"m": 256, "n": 256, "k": 256, "layout": "nt", "dtype": "float16", "accum_dtype": "float16"}
    params: dict[str, Value] = {**GEMM, "block_m": 128, "block_n": 128, "warps_n": 1, "smem_epilogue": 0, "split_k": 1}
    source = cuda_source(made(load_rule(ROOT, "matmul").of(ROOT, attrs), "gpu_matmul_tc", params), H200, "kernel")
    # 64 x 128 accumulators, of which each of the 32 lanes has a part.
    assert max(int(extent) for extent in re.findall(r"half \w+\[(\d+)\];", source)) == 64 * 128 // 32
    usage = compiled_cubin(source, "sm_90").usage.values()
    assert not any(each.stack_bytes + each.spill_bytes for each in usage)
