"""The template wgmma_matmul computes GEMMs of every layout, dtype and size as the rule does, on the CPU, and compiles without spills."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulation import Kernel
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at, only
from support.wgmma_cases import FLOAT16, GEMMS, PACKED, PLAIN, SMS, STREAMED_GEMMS

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import compile_cuda_object, cuda_source
from kerneldecl.compiler.passes.dependent_launch import TAG
from kerneldecl.model import Arch, Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import wgmma_matmul

ROOT = REPOSITORY


def the_gpu() -> Arch:
    arch = load_arch(ROOT, "h200")
    return replace(arch, gpu=replace(arch.the_gpu, sm_count=SMS))


def gemm(attrs: dict[str, Any]) -> Any:
    return load_rule(ROOT, "matmul").of(ROOT, {**FLOAT16, **attrs})


def made(attrs: dict[str, Any], params: dict[str, Value]) -> Any:
    return wgmma_matmul.apply(canonical.lower(gemm(attrs)), {**PLAIN, **params}, the_gpu())


def as_numpy(dtype: str) -> Any:
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def random(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Any:
    if dtype == "int8":
        return rng.integers(-128, 128, shape).astype(dtype)
    return rng.standard_normal(shape).astype("float32").astype(as_numpy(dtype))


OF_EACH_KIND = (
    "prefetched by clusters",
    "even n, tn",
    "split-K by a workspace, swapped, packed",
)
"""Schedules that differ in what they wait for. Stream-K has a file of its own."""


@needs_nvcc
@pytest.mark.parametrize("name", only(OF_EACH_KIND, GEMMS))
def test_computes_what_the_rule_does(name: str) -> None:
    attrs, params = GEMMS[name]
    rule, mod = gemm(attrs), made(attrs, params)
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
    usage = compiled_cubin(kernel.source, "sm_90a").usage.values()
    assert "wgmma.mma_async" in kernel.source
    assert not any(each.spill_bytes for each in usage)


@pytest.mark.parametrize(
    ("attrs", "params", "prefetches"),
    at(
        {0, 2},
        [
            ({"m": 128}, {"pdl": 1}, True),
            ({"m": 128}, {"pdl": 0}, False),
            ({"m": 300}, {"pdl": 1}, False),  # CTAs have several tiles
            ({"m": 128, "k": 201}, {"pdl": 1}, False),  # threads load its rows through registers
            ({"m": 128, "k": 201}, {**PACKED, "pdl": 1}, False),  # what it loads is still being copied
        ],
    ),
)
def test_a_kernel_prefetches_its_first_k_tiles_before_it_waits(attrs: dict[str, Any], params: dict[str, Value], prefetches: bool) -> None:
    before, waits, after = cuda_source(made(attrs, params), the_gpu(), "kd_main").rpartition("griddepcontrol_wait();")
    assert ("prefetch_tensor" in before.rpartition("__global__")[2]) == prefetches
    assert "prefetch_tensor" not in after
    assert bool(waits) == params["pdl"]


@pytest.mark.parametrize("name", at({1, 2, 4}, STREAMED_GEMMS))
def test_tma_loads_a_residual_to_where_results_are_stored_from(name: str) -> None:
    source = cuda_source(made(*STREAMED_GEMMS[name]), the_gpu(), "kd_main")
    assert "ldmatrix" in source


@pytest.mark.parametrize(
    ("attrs", "params"),
    at(
        {1, 2},
        [
            ({"m": 300, "epilogue": ["bias"]}, {"block_n": 64}),  # a vector
            ({"m": 300, "n": 131, "epilogue": ["add"]}, {"block_n": 64}),  # TMA takes no such rows
            ({"m": 300, "k": 512, "epilogue": ["add"]}, {"block_n": 64, "split_k": 2}),  # CTAs exchange accumulators there
            ({"m": 300, "epilogue": ["add"]}, {"block_m": 256, "block_n": 128, "stages": 4}),  # no room
            ({"m": 300, "out_dtype": "float32", "epilogue": ["add"]}, {"block_n": 64}),  # results do not go through shared memory
        ],
    ),
)
def test_other_operands_of_the_epilogue_are_loaded_by_threads(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert "ldmatrix" not in cuda_source(made(attrs, params), the_gpu(), "kd_main")


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


@needs_nvcc
@pytest.mark.parametrize("pdl", [0, 1])
def test_a_kernel_that_waits_is_launched_with_pdl(pdl: int, tmp_path: Path) -> None:
    made_of = compile_cuda_object(made({"k": 64}, {"pdl": pdl}), the_gpu(), "kd_main", LocalStore(tmp_path))
    assert made_of.content.count(TAG.encode()) == pdl


@needs_nvcc
def test_operands_are_copied_before_the_gemm_begins_to_read(tmp_path: Path) -> None:
    """Both kernels have PDL, and each one waits; an operand that TMA can load is not copied."""
    made_of = compile_cuda_object(made({"m": 131, "n": 136, "k": 136, "layout": "tn"}, PACKED), the_gpu(), "kd_main", LocalStore(tmp_path))
    copying, multiplying = made_of.launches
    assert made_of.content.count(TAG.encode()) == 2
    assert copying.dynamic_smem_bytes == 0
    assert copying.usage.spill_bytes == 0
    pieces = 136 * -(-131 * 2 // 16)  # of 16 bytes, in rows of k
    assert copying.grid[0] * copying.block[0] < 2 * pieces
    assert multiplying.block == (384, 1, 1)


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"dtype": "float32"}, {}),
        ({"k": 64 * 10}, {"block_n": 32, "split_k": 9}),
        ({"k": 64 * 10}, {"block_n": 32, "workspace": 1}),
        ({"k": 64 * 10}, {"block_n": 32, "cluster_m": 2, "split_k": 2}),
        ({}, {"block_m": 96}),
        ({}, {"stages": 12, "block_n": 256}),
        ({}, {"block_m": 256, "block_n": 256}),
        ({}, {"split_k": 8}),
        ({}, {"kernel_schedule": "pingpong", "consumers": 3, "block_m": 64}),
        ({}, {"kernel_schedule": "staggered", "stages": 5}),
        ({"k": 512}, {"kernel_schedule": "staggered", "consumers": 1, "block_m": 64}),
        ({"k": 131}, {"cluster_m": 2, "block_n": 128}),
        ({"n": 131, "layout": "nn"}, {"cluster_n": 2, "block_n": 128}),
        ({"dtype": "int8", "k": 256}, {"block_n": 40}),
        ({"m": 131, "n": 131}, {"pack": 1}),
    ],
)
def test_does_not_apply(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert made(attrs, params) is None


def test_older_gpus_have_no_wgmma() -> None:
    mod = canonical.lower(gemm({}))
    assert wgmma_matmul.apply(mod, PLAIN, load_arch(ROOT, "a100-80gb")) is None
