"""The template wgmma_matmul computes products of every layout, dtype and size as the rule does, on the CPU, and compiles without spills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compilers import needs_nvcc
from emulation import Kernel

from kerneldecl import nvcc
from kerneldecl.compiler import tensorir
from kerneldecl.model import Arch, Value
from kerneldecl.plugins import load_arch, load_rule
from kerneldecl.templates import wgmma_matmul

ROOT = Path(__file__).parents[2]
SMS = 3
"""Of the GPU that is emulated, so that blocks have several tiles."""
PLAIN: dict[str, Value] = {
    "block_m": 128,
    "block_n": 64,
    "consumers": 2,
    "stages": 3,
    "cluster_m": 1,
    "cluster_n": 1,
    "raster": 2,
    "split": 1,
    "schedule": "cooperative",
    "swap": 0,
    "dependent": 0,
}
FLOAT16: dict[str, Any] = {"m": 136, "n": 136, "k": 200, "layout": "nt", "dtype": "float16"}
TFLOAT32 = {"dtype": "float32", "precision": "tfloat32"}
ONE = {"block_m": 64, "consumers": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "nn": ({"layout": "nn"}, {}),
    "nt": ({"layout": "nt", "m": 300}, {}),
    "tn": ({"layout": "tn"}, {}),
    "tt": ({"layout": "tt", "batch": 2}, {}),
    "attention": ({"layout": "nn", "batch": 3, "m": 70, "n": 64, "k": 72}, {"dependent": 1}),
    "bfloat16 to float32": ({"dtype": "bfloat16", "out_dtype": "float32"}, {"block_n": 96}),
    "int8": ({"dtype": "int8", "k": 304}, {"block_n": 256}),
    "e4m3": ({"dtype": "float8_e4m3fn", "out_dtype": "float16", "k": 304}, {}),
    "e5m2": ({"dtype": "float8_e5m2", "out_dtype": "bfloat16", "k": 304}, {}),
    "one of each": ({"m": 1, "n": 1, "k": 1}, ONE),
    "odd k": ({"m": 130, "k": 131}, {"block_n": 128}),
    "odd k, nn": ({"m": 133, "k": 131, "layout": "nn"}, {"block_n": 64}),
    "odd n and k": ({"n": 131, "k": 75, "epilogue": ["bias", "add"]}, {"block_n": 128}),
    "even n and k": ({"m": 261, "n": 130, "k": 198, "epilogue": ["bias", "relu"]}, {"block_m": 256, "block_n": 128}),
    "odd k to float32": ({"m": 70, "n": 5, "k": 75, "out_dtype": "float32"}, {}),
    "odd k, swapped, in parts": ({"m": 13, "n": 131, "k": 201}, {**ONE, "swap": 1, "split": 2}),
    "odd k, ping-pong": ({"m": 400, "n": 131, "k": 201}, {"schedule": "pingpong", "block_n": 128}),
    "odd n, nn": ({"n": 131, "layout": "nn"}, {"block_n": 128}),
    "even n, tn": ({"m": 130, "n": 134, "layout": "tn", "batch": 3}, {"schedule": "pingpong", "block_n": 64}),
    "odd sizes, tt": ({"m": 151, "n": 131, "k": 137, "layout": "tt"}, {"block_n": 128}),
    "int8, nn": ({"dtype": "int8", "layout": "nn", "n": 144, "k": 144}, {"block_n": 128}),
    "odd sizes of e4m3, tt": (
        {"dtype": "float8_e4m3fn", "out_dtype": "float16", "m": 150, "n": 131, "k": 137, "layout": "tt"},
        {"block_n": 96, "dependent": 1},
    ),
    "odd k of e5m2": ({"dtype": "float8_e5m2", "out_dtype": "float16", "k": 201}, {"split": 2}),
    "parts beyond the reduction": ({"m": 70, "n": 100, "k": 64 * 5}, {"split": 4, "block_n": 64}),
    "cluster of two rows": ({"m": 520}, {"cluster_m": 2, "block_n": 128}),
    "cluster of two by two": ({"m": 520, "layout": "tn"}, {"cluster_m": 2, "cluster_n": 2, "block_n": 128}),
    "cluster of four columns": ({"n": 600, "epilogue": ["silu", "add"]}, {"cluster_n": 4}),
    "ping-pong": ({"m": 600, "epilogue": ["bias", "gelu"]}, {"schedule": "pingpong", "block_m": 64, "block_n": 128}),
    "ping-pong of two slabs": ({"m": 600}, {"schedule": "pingpong", "block_m": 128, "block_n": 128}),
    "three consumers": ({"m": 400}, {"consumers": 3, "block_m": 192, "block_n": 128, "dependent": 1}),
    "one row, swapped": ({"m": 1, "n": 520}, {"swap": 1, "block_n": 8, "stages": 8}),
    "few rows, swapped": ({"m": 21, "epilogue": ["bias", "relu"]}, {**ONE, "swap": 1, "block_n": 24}),
    "few rows, swapped, odd n": ({"m": 19, "n": 133}, {**ONE, "swap": 1, "block_n": 24}),
    "parts": ({"m": 70, "n": 100, "k": 64 * 8, "epilogue": ["bias", "relu"]}, {"split": 4, "block_n": 64}),
    "parts, swapped": ({"m": 13, "k": 64 * 16, "dtype": "bfloat16"}, {**ONE, "swap": 1, "block_n": 16, "split": 8, "dependent": 1}),
    "parts of int8": ({"m": 70, "n": 100, "k": 128 * 4, "dtype": "int8"}, {"split": 2, "block_n": 64}),
    "scales of int8": (
        {"dtype": "int8", "out_dtype": "bfloat16", "k": 304, "epilogue": ["scale_rows", "scale_columns", "bias"]},
        {"block_n": 128},
    ),
    "sums in float16": ({"accum_dtype": "float16", "m": 300}, {"block_m": 256, "block_n": 256, "stages": 2}),
    "sums in float16, nn": ({"accum_dtype": "float16", "layout": "nn", "epilogue": ["bias", "relu"]}, {"block_n": 128, "cluster_m": 2}),
    "sums in float16 to float32": ({"accum_dtype": "float16", "out_dtype": "float32", "n": 131}, {"block_n": 72}),
    "sums in float16, ping-pong": ({"accum_dtype": "float16", "m": 600, "n": 264}, {"schedule": "pingpong", "block_n": 256}),
    "sums in float16, odd n and k": ({"accum_dtype": "float16", "n": 131, "k": 75, "epilogue": ["add"]}, {"block_n": 128}),
    "sums in float16, swapped": ({"accum_dtype": "float16", "m": 21}, {**ONE, "swap": 1, "block_n": 24}),
    "parts of sums in float16": ({"accum_dtype": "float16", "m": 70, "n": 100, "k": 64 * 8}, {"split": 4, "block_n": 64}),
    "tfloat32": ({**TFLOAT32, "m": 300}, {}),
    "tfloat32, nn": ({**TFLOAT32, "layout": "nn", "k": 100, "epilogue": ["bias", "relu"]}, {"block_n": 128}),
    "tfloat32, odd sizes, tn": ({**TFLOAT32, "m": 151, "n": 131, "k": 67, "layout": "tn"}, {"block_n": 72}),
    "tfloat32, odd k": ({**TFLOAT32, "k": 67, "out_dtype": "float16"}, {"block_n": 128}),
    "tfloat32, batch, ping-pong": ({**TFLOAT32, "batch": 3, "m": 200, "k": 72}, {"schedule": "pingpong", "cluster_m": 2, "block_n": 128}),
    "tfloat32, few rows, in parts": ({**TFLOAT32, "m": 21, "k": 256}, {**ONE, "swap": 1, "block_n": 24, "split": 2}),
    "one step": ({"k": 16}, {"stages": 2}),
}


def the_gpu() -> Arch:
    arch = load_arch(ROOT, "h200")
    return replace(arch, gpu=replace(arch.the_gpu, sm_count=SMS))


def product(attrs: dict[str, Any]) -> Any:
    return load_rule(ROOT, "matmul").of(ROOT, {**FLOAT16, **attrs})


def made(attrs: dict[str, Any], params: dict[str, Value]) -> Any:
    return wgmma_matmul.apply(tensorir.lower(product(attrs)), {**PLAIN, **params}, the_gpu())


def as_numpy(dtype: str) -> Any:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def random(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype(dtype)
    return rng.standard_normal(shape).astype("float32").astype(as_numpy(dtype))


@needs_nvcc
@pytest.mark.parametrize("name", CASES)
def test_computes_what_the_rule_does(name: str) -> None:
    attrs, params = CASES[name]
    rule, mod = product(attrs), made(attrs, params)
    assert mod is not None
    kernel = Kernel(mod["main"])
    rng = np.random.default_rng(1)
    signature = rule.signature()
    [out] = signature.outputs
    arguments = [random(arg.dtype, arg.shape, rng) for arg in signature.inputs]
    result = kernel(*arguments, np.zeros(out.shape, as_numpy(out.dtype)))[-1].astype("float64")
    expected = rule.reference(*(argument.astype("float64") for argument in arguments))
    assert np.linalg.norm(result - expected) <= rule.tolerance() * np.linalg.norm(expected)
    # nvcc.compile_cubin refuses code in which wgmma waits after each instruction.
    usage = nvcc.compile_cubin(kernel.source, "sm_90a").usage.values()
    assert "wgmma.mma_async" in kernel.source
    assert not any(each.spill_bytes for each in usage)


@needs_nvcc
def test_rows_beyond_a_matrix_do_not_count() -> None:
    """Rows of 75 elements are read 8 at a time: what follows them in memory is the next row's, infinite here."""
    attrs = {"m": 16, "n": 8, "k": 75}
    rng = np.random.default_rng(1)
    a, b = random("float16", (16, 75), rng), random("float16", (8, 75), rng)
    a[9], b[3] = np.inf, np.nan
    result = Kernel(made(attrs, {})["main"])(a, b, np.zeros((16, 8), "float16"))[-1]
    is_finite = np.isfinite(result)
    assert is_finite[[row for row in range(16) if row != 9]][:, [column for column in range(8) if column != 3]].all()
    assert not is_finite[9].any()
    assert not is_finite[:, 3].any()


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"dtype": "float32"}, {}),
        ({"accum_dtype": "float16", "m": 16, "k": 64 * 8}, {**ONE, "swap": 1, "block_n": 8, "split": 4}),
        ({}, {"block_m": 96}),
        ({}, {"stages": 12, "block_n": 256}),
        ({}, {"block_m": 256, "block_n": 256}),
        ({}, {"split": 8}),
        ({}, {"schedule": "pingpong", "consumers": 3, "block_m": 64}),
        ({"k": 131}, {"cluster_m": 2, "block_n": 128}),
        ({"n": 131, "layout": "nn"}, {"cluster_n": 2, "block_n": 128}),
        ({"dtype": "int8", "k": 256}, {"block_n": 40}),
    ],
)
def test_does_not_apply(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert made(attrs, params) is None


def test_older_gpus_have_no_wgmma() -> None:
    mod = tensorir.lower(product({}))
    assert wgmma_matmul.apply(mod, PLAIN, load_arch(ROOT, "a100-80gb")) is None
