"""Schedules on GPUs as texts to review, and that nvcc keeps what they compute in registers on every generation of GPUs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm

from kerneldecl import nvcc
from kerneldecl.compiler import tensorir
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.space import iter_space
from kerneldecl.errors import ToolchainError
from kerneldecl.model import Arch
from kerneldecl.plugins import load_arch, load_rule
from kerneldecl.stores.local import LocalStore

ROOT = Path(__file__).parents[2]
H200 = load_arch(ROOT, "h200")
TILES = {"block_m": 32, "block_n": 64, "block_k": 8, "thread_m": 4, "thread_n": 8, "raster": 1}
ROWS = {"across": False, "threads": 32, "rows": 2, "width": 8, "unroll": 2, "chunks": 1}

CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "matmul_in_registers": ("gpu_matmul_simt", "matmul", {"m": 65, "n": 96, "k": 40, "layout": "nt"}, {**TILES, "stages": 2}),
    "matmul_ahead": ("gpu_matmul_simt", "matmul", {"m": 64, "n": 64, "k": 64, "epilogue": ("bias",)}, {**TILES, "stages": 4}),
    "conv2d": (
        "gpu_matmul_simt",
        "conv2d",
        {"n": 2, "h": 9, "w": 9, "c": 3, "f": 64, "kh": 3, "kw": 3, "padding": 1},
        {**TILES, "stages": 2},
    ),
    "reduce_rows": ("gpu_reduce", "reduce", {"op": "sum", "shape": (64, 1024), "axes": (1,), "dtype": "float16"}, ROWS),
    "reduce_columns": (
        "gpu_reduce",
        "reduce",
        {"op": "max", "shape": (64, 1024), "axes": (0,), "dtype": "bfloat16"},
        {**ROWS, "across": True, "threads": 16},
    ),
    "gemv": ("gpu_gemv", "gemv", {"n": 64, "k": 1024, "dtype": "float16"}, {**ROWS, "tile": 2}),
    "gemv_i4": ("gpu_gemv", "gemv_i4", {"n": 64, "k": 4096, "dtype": "float32"}, {**ROWS, "width": 16, "tile": 1}),
    "gemv_i4_pairs": ("gpu_gemv", "gemv_i4", {"n": 64, "k": 4096, "dtype": "float16"}, {**ROWS, "width": 16, "tile": 2}),
    "softmax": (
        "gpu_rowwise",
        "softmax",
        {"shape": (64, 256), "dtype": "float16"},
        {"threads": 32, "rows": 4, "width": 8, "kept": True},
    ),
    "elementwise": ("gpu_elementwise", "elementwise", {"op": "gelu", "shape": (64, 256)}, {"threads": 64, "width": 4, "unroll": 2}),
    "transpose": (
        "gpu_elementwise",
        "transpose",
        {"shape": (128, 192), "axes": (1, 0), "dtype": "int8"},
        {"threads": 128, "width": 4, "unroll": 1, "tile": (32, 64)},
    ),
}


def missing() -> str:
    try:
        nvcc.compiler()
    except ToolchainError as error:
        return str(error)
    return ""


def lowered(rule: str, attrs: dict[str, Any]) -> tvm.IRModule:
    return tensorir.lower(load_rule(ROOT, rule).of(ROOT, attrs))


def scheduled(template: str, mod: tvm.IRModule, params: dict[str, Any], arch: Arch) -> Any:
    schedule = importlib.import_module(f"kerneldecl.templates.{template}").apply(mod, params, arch)
    assert schedule is not None
    return schedule.mod


@pytest.mark.parametrize("name", CASES)
def test_schedules_are_as_reviewed(name: str, golden: Callable[[str, str], None]) -> None:
    template, rule, attrs, params = CASES[name]
    golden(f"schedule_{name}", tensorir.canonical_text(scheduled(template, lowered(rule, attrs), params, H200)))


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("gpu", ["t4", "a100-80gb", "l4", "h200", "b200"])
@pytest.mark.parametrize(
    ("policy", "rule", "attrs"),
    [
        ("gpu_matmul_simt", "matmul", {"m": 4096, "n": 4096, "k": 4096, "layout": "nt"}),
        ("gpu_gemv", "gemv_i4", {"n": 4096, "k": 4096, "dtype": "float16"}),
        ("gpu_rowwise", "softmax", {"shape": (4096, 1024), "dtype": "float16"}),
    ],
    ids=["matmul", "gemv_i4", "softmax"],
)
def test_first_candidates_stay_in_registers(gpu: str, policy: str, rule: str, attrs: dict[str, Any], tmp_path: Path) -> None:
    arch, mod = load_arch(ROOT, gpu), lowered(rule, attrs)
    first, *_ = importlib.import_module(f"kerneldecl.policies.{policy}").propose(iter_space(mod), arch, 1, ())
    kernel = scheduled(first.candidate.template, mod, dict(first.candidate.params), arch)
    for launch in compile_cuda_object(kernel, arch, "kernel", LocalStore(tmp_path)).launches:
        assert (launch.usage.stack_bytes, launch.usage.spill_bytes) == (0, 0)
        assert launch.usage.registers * launch.block[0] * launch.block[1] <= arch.the_gpu.registers_per_block
        assert launch.dynamic_smem_bytes + launch.usage.smem_bytes <= arch.the_gpu.smem_per_block_optin_bytes
