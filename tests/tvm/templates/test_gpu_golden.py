"""The schedule that each GPU template makes for each dtype, as text: a change of it is to be seen in review, not on a GPU.

Parameters stand here and do not come from a policy, so that a better model changes no schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.repository import REPOSITORY

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.model import Candidate
from kerneldecl.plugins.load import load_arch, load_rule

ROOT = REPOSITORY
ARCH = load_arch(ROOT, "h200")

MATMUL = {"m": 256, "n": 192, "k": 128}
TENSOR = {
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "warps_m": 2,
    "warps_n": 2,
    "stages": 3,
    "raster_group": 1,
    "smem_epilogue": 0,
    "split_k": 1,
}
DOUBLE_BUFFERED = {**TENSOR, "smem_epilogue": 1, "double_buffer": 1}
CONV_TC = {"rows": 2, "columns": 16, "block_n": 64, "warps_rows": 2, "warps_columns": 1, "warps_n": 1, "smem_epilogue": 1}
SIMT = {"block_m": 32, "block_n": 64, "block_k": 16, "thread_m": 4, "thread_n": 8, "stages": 2, "raster_group": 1, "split_k": 1}
CONV = {"n": 2, "h": 28, "w": 28, "c": 32, "f": 64, "kh": 3, "kw": 3, "padding": 1}
ROWS = {"strided": False, "chunks": 1, "rows": 4, "threads": 32, "unroll": 4, "width": 8}
COLUMNS = {"strided": True, "chunks": 1, "rows": 32, "threads": 4, "unroll": 8, "width": 4}
VECTORS = {"threads": 128, "unroll": 1, "width": 8}
POOL = {"rows": 4, "threads": 4, "width": 8}
KEPT = {"in_registers": True, "rows": 4, "threads": 32, "width": 4}
LONG = {"strided": False, "chunks": 16, "rows": 1, "threads": 256, "unroll": 4, "width": 4}
IMAGE = {"rows": 4, "columns": 16, "row_tiles": 2, "block_n": 64, "thread_m": 8, "thread_n": 4}
# fmt: off
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "elementwise_float16": ("gpu_elementwise", "elementwise", {"op": "add", "shape": (512, 512), "dtype": "float16"}, VECTORS),
    "elementwise_float32": ("gpu_elementwise", "elementwise", {"op": "gelu", "shape": (500, 510)}, {**VECTORS, "width": 2}),
    "elementwise_int8": ("gpu_elementwise", "elementwise", {"op": "add", "shape": (512, 512), "dtype": "int8"}, {**VECTORS, "width": 16}),
    "transpose_float16": (
        "gpu_elementwise", "transpose", {"shape": (512, 512), "axes": (1, 0), "dtype": "float16"}, {**VECTORS, "tile": (32, 32)},
    ),
    "reduce_float16": ("gpu_reduce", "reduce", {"op": "sum", "shape": (512, 1024), "axes": (1,), "dtype": "float16"}, ROWS),
    "reduce_float32": ("gpu_reduce", "reduce", {"op": "max", "shape": (512, 1024), "axes": (0,)}, COLUMNS),
    "reduce_chunks_float32": ("gpu_reduce", "reduce", {"op": "sum", "shape": (4, 65536), "axes": (1,)}, LONG),
    "window_float16": ("gpu_window", "tensor_ir", {"file": "tests/support/sliding_windows.py", "function": "max_pool"}, POOL),
    "softmax_float16": ("gpu_rowwise", "softmax", {"shape": (512, 1024), "dtype": "float16"}, KEPT),
    "layer_norm_float32": ("gpu_rowwise", "layer_norm", {"shape": (512, 1024)}, KEPT),
    "rms_norm_bfloat16": ("gpu_rowwise", "rms_norm", {"shape": (512, 1024), "dtype": "bfloat16"}, KEPT),
    "gemv_float16": ("gpu_gemv", "gemv", {"n": 512, "k": 1024, "dtype": "float16"}, {**ROWS, "tile": 1}),
    "gemv_float32": ("gpu_gemv", "gemv", {"n": 512, "k": 1024, "layout": "t"}, {**COLUMNS, "tile": 1}),
    "gemv_i4_float16": ("gpu_gemv", "gemv_i4", {"n": 512, "k": 1024, "dtype": "float16"}, {**ROWS, "tile": 1, "width": 16, "unroll": 1}),
    "gemv_i4_float32": ("gpu_gemv", "gemv_i4", {"n": 512, "k": 1024}, {**ROWS, "tile": 1, "width": 16, "unroll": 1}),
    "gemv_i4_pairs": ("gpu_gemv", "gemv_i4", {"n": 64, "k": 4096, "dtype": "float16"}, {**ROWS, "tile": 2, "width": 16, "unroll": 2}),
    "fallback_float32": ("gpu_fallback", "softmax", {"shape": (64, 128), "axis": 0}, {"threads": 64, "across": False}),
    "tc_float16": ("gpu_matmul_tc", "matmul", {**MATMUL, "layout": "nt", "dtype": "float16"}, TENSOR),
    "tc_float16_accum": ("gpu_matmul_tc", "matmul", {**MATMUL, "dtype": "float16", "accum_dtype": "float16"}, TENSOR),
    "tc_bfloat16": ("gpu_matmul_tc", "matmul", {**MATMUL, "layout": "tn", "dtype": "bfloat16", "epilogue": ("bias", "relu")}, TENSOR),
    "tc_int8": ("gpu_matmul_tc", "matmul", {**MATMUL, "k": 512, "layout": "nt", "dtype": "int8"}, {**TENSOR, "block_k": 64}),
    "tc_conv2d_float16": ("gpu_matmul_tc", "conv2d", {**CONV, "dtype": "float16"}, TENSOR),
    "tc_split_k_float16": ("gpu_matmul_tc", "matmul", {**MATMUL, "dtype": "float16"}, {**TENSOR, "stages": 2, "split_k": 2}),
    "tc_smem_epilogue_float16": ("gpu_matmul_tc", "matmul", {**MATMUL, "layout": "tt", "dtype": "float16"}, {**TENSOR, "smem_epilogue": 1}),
    "tc_double_buffer_float16": ("gpu_matmul_tc", "matmul", {**MATMUL, "dtype": "float16"}, DOUBLE_BUFFERED),
    "conv2d_tc_float16": ("gpu_conv2d_tc", "conv2d", {**CONV, "c": 3, "dtype": "float16"}, CONV_TC),
    "simt_float32": ("gpu_matmul_simt", "matmul", {**MATMUL, "layout": "nt"}, SIMT),
    "simt_async_float32": ("gpu_matmul_simt", "matmul", {**MATMUL, "epilogue": ("bias",)}, {**SIMT, "stages": 4}),
    "simt_split_k_float32": ("gpu_matmul_simt", "matmul", {**MATMUL, "layout": "nt", "epilogue": ("bias", "relu")}, {**SIMT, "split_k": 3}),
    "simt_float16": ("gpu_matmul_simt", "matmul", {**MATMUL, "dtype": "float16"}, SIMT),
    "simt_int8": ("gpu_matmul_simt", "matmul", {**MATMUL, "layout": "nt", "dtype": "int8"}, SIMT),
    "simt_conv2d_float32": ("gpu_matmul_simt", "conv2d", CONV, SIMT),
    "conv2d_simt_float32": ("gpu_conv2d_simt", "conv2d", {**CONV, "c": 3}, IMAGE),
}
# fmt: on


def schedule_of(template: str, rule: str, attrs: dict[str, Any], params: dict[str, Any]) -> str:
    mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))
    applied = apply_candidate(ROOT, mod, Candidate.of(template, params), ARCH)
    assert applied is not None
    return f"{applied.mod.script()}\n"


@pytest.mark.parametrize("name", CASES)
def test_schedule_is_the_reviewed_one(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"gpu_{name}", schedule_of(*CASES[name]))
