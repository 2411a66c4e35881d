"""Products on a GPU compute what the rule's reference computes: layouts, dtypes, odd sizes, epilogues, both templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

import kerneldecl
from kerneldecl.archfile import read_arch
from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import tensorir
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.space import iter_space
from kerneldecl.cudalink import link_cuda_library
from kerneldecl.plugins import load_rule
from kerneldecl.policies import gpu_matmul_simt as simt_policy
from kerneldecl.policies import gpu_matmul_tc as tc_policy
from kerneldecl.policies import wgmma_matmul as wgmma_policy
from kerneldecl.stores.local import LocalStore
from kerneldecl.templates import gpu_conv2d_tc, gpu_matmul_simt, gpu_matmul_tc, wgmma_matmul

pytestmark = pytest.mark.gpu

ROOT = Path(kerneldecl.__file__).parent.parent
H200_FILE = Path(kerneldecl.__file__).parent / "archs" / "h200.toml"
H200 = read_arch("h200", H200_FILE.read_bytes(), "h200.toml")
BOTH = ((tc_policy, gpu_matmul_tc), (simt_policy, gpu_matmul_simt))
SIZES = [(256, 256, 256), (1000, 1003, 517), (16, 512, 1024), (129, 66, 40), (17, 31, 16), (64, 192, 72)]


def verify(attrs: dict[str, Any], policy: Any, template: Any, folder: Path, *, count: int) -> int:
    """Run every so-many-th of the proposals for a product; return how many those are."""
    rule = load_rule(ROOT, "matmul").of(ROOT, attrs)
    proposals = policy.propose(iter_space(tensorir.lower(rule)), H200, 20, ())
    chosen = [dict(proposal.candidate.params) for proposal in proposals[:: max(1, len(proposals) // count)]]
    run_and_compare(rule, template, chosen, folder)
    return len(chosen)


def run_and_compare(rule: Any, template: Any, chosen: list[dict[str, Any]], folder: Path) -> None:
    """Build kernels, run each on poisoned memory, compare with the reference."""
    mod = tensorir.lower(rule)
    inputs = rule.inputs(np.random.default_rng(0))
    expected = rule.reference(*inputs)
    device = tvm.cuda(0)
    held = [tvm.runtime.tensor(value, device) for value in inputs]
    (out,) = rule.signature().outputs
    for at, params in enumerate(chosen):
        schedule = template.apply(mod, params, H200)
        assert schedule is not None, params
        path = folder / f"{template.__name__}{at}.o"
        path.write_bytes(compile_cuda_object(schedule.mod, H200, "kd_main", LocalStore(folder)).content)
        link_cuda_library(path.with_suffix(".so"), [path])
        result = tvm.runtime.tensor(poisoned(out), device)
        tvm.runtime.load_module(str(path.with_suffix(".so")))["kd_main"](*held, result)
        device.sync()
        error = relative_error(result.numpy(), expected)
        assert error <= rule.tolerance(), f"{params}: {error}"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_tensor_cores(size: tuple[int, int, int], layout: str, dtype: str, tmp_path: Path) -> None:
    m, n, k = size
    assert verify({"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype}, tc_policy, gpu_matmul_tc, tmp_path, count=2)


@pytest.mark.parametrize("size", [(256, 256, 256), (129, 66, 40), (64, 64, 1024)])
def test_integers_are_exact(size: tuple[int, int, int], tmp_path: Path) -> None:
    m, n, k = size
    for policy, template in BOTH:
        assert verify({"m": m, "n": n, "k": k, "layout": "nt", "dtype": "int8"}, policy, template, tmp_path, count=3)


@pytest.mark.parametrize("size", [*SIZES, (1, 1, 1), (5, 7, 3)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_cuda_cores(size: tuple[int, int, int], layout: str, tmp_path: Path) -> None:
    m, n, k = size
    assert verify({"m": m, "n": n, "k": k, "layout": layout, "dtype": "float32"}, simt_policy, gpu_matmul_simt, tmp_path, count=2)


@pytest.mark.parametrize("epilogue", [("bias",), ("bias", "relu"), ("gelu",), ("bias", "silu", "add")])
@pytest.mark.parametrize("size", [(128, 256, 64), (100, 203, 117)])
def test_epilogues_and_batches(epilogue: tuple[str, ...], size: tuple[int, int, int], tmp_path: Path) -> None:
    m, n, k = size
    attrs = {"m": m, "n": n, "k": k, "batch": 3, "layout": "nt", "dtype": "float16", "epilogue": epilogue}
    for policy, template in BOTH:
        assert verify(attrs, policy, template, tmp_path, count=2)


def test_float16_sums(tmp_path: Path) -> None:
    attrs = {"m": 128, "n": 128, "k": 256, "layout": "nn", "dtype": "float16", "accum_dtype": "float16"}
    assert verify(attrs, tc_policy, gpu_matmul_tc, tmp_path, count=2)


@pytest.mark.parametrize("size", [(256, 256, 1024), (1000, 1003, 517), (16, 512, 1024)])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("dtypes", [{"dtype": "float16", "accum_dtype": "float16"}, {"precision": "tfloat32"}])
def test_wgmma_in_other_precisions(size: tuple[int, int, int], layout: str, dtypes: dict[str, str], tmp_path: Path) -> None:
    m, n, k = size
    assert verify({"m": m, "n": n, "k": k, "layout": layout, **dtypes}, wgmma_policy, wgmma_matmul, tmp_path, count=2)


TILING: dict[str, Any] = {
    "block_m": 64,
    "block_n": 64,
    "block_k": 32,
    "warps_m": 2,
    "warps_n": 2,
    "stages": 3,
    "raster": 1,
    "gather": 0,
    "parts": 1,
}


@pytest.mark.parametrize("params", [{"parts": 3}, {"parts": 2, "gather": 1}, {"gather": 1}, {"block_m": 96, "block_n": 96}])
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_parts_and_gathered_results(params: dict[str, Any], layout: str, tmp_path: Path) -> None:
    attrs = {"m": 200, "n": 136, "k": 1000, "layout": layout, "dtype": "float16", "epilogue": ("bias", "relu")}
    run_and_compare(load_rule(ROOT, "matmul").of(ROOT, attrs), gpu_matmul_tc, [{**TILING, **params}], tmp_path)


CONVOLUTIONS: list[dict[str, Any]] = [
    {"n": 2, "f": 64, "h": 40, "w": 64, "c": 3, "kh": 7, "kw": 7, "stride": 2, "padding": 3},
    {"n": 3, "f": 40, "h": 19, "w": 37, "c": 5, "kh": 3, "kw": 2, "padding": 1, "epilogue": ("bias", "relu")},
    {"n": 3, "f": 17, "h": 19, "w": 21, "c": 4, "kh": 3, "kw": 3, "dilation": 2, "dtype": "bfloat16"},
]


@pytest.mark.parametrize("attrs", CONVOLUTIONS)
def test_convolutions_out_of_the_image(attrs: dict[str, Any], tmp_path: Path) -> None:
    rule = load_rule(ROOT, "conv2d").of(ROOT, {"dtype": "float16", **attrs})
    tiling = {"rows": 4, "columns": 32, "block_n": 32, "warps_rows": 2, "warps_columns": 2, "warps_n": 1}
    run_and_compare(rule, gpu_conv2d_tc, [{**tiling, "gather": gather} for gather in (0, 1)], tmp_path)


@pytest.mark.parametrize(
    "attrs", [*CONVOLUTIONS, {"n": 2, "f": 72, "h": 30, "w": 23, "c": 24, "kh": 1, "kw": 1, "stride": 2, "padding": 3}]
)
def test_convolutions_as_products(attrs: dict[str, Any], tmp_path: Path) -> None:
    rule = load_rule(ROOT, "conv2d").of(ROOT, {"dtype": "float16", **attrs})
    run_and_compare(rule, gpu_matmul_tc, [{**TILING, "stages": 2, "gather": gather} for gather in (0, 1)], tmp_path)
