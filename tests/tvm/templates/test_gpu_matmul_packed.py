"""The kernels of GEMMs of few rows with packed weights on mma.sync compute what the rule does, on the CPU, and compile without spills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import Kernel
from support.compilers import compiled_cubin, needs_nvcc
from support.packed_kernels import check, rule_of
from support.repository import REPOSITORY
from support.thinned import at, every, only

from kerneldecl.analysis.matmul_packed import PackedParams, packed_of
from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_matmul_packed as policy
from kerneldecl.policies import gpu_matmul_quantized
from kerneldecl.templates import gpu_matmul_packed
from kerneldecl.toolchain import nvcc

ROOT = REPOSITORY
MXFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16, "tensor_scale": True}
PLAIN: dict[str, Value] = {"rows": 32, "warps_n": 1, "warps_k": 4, "stages": 3, "split_k": 1, "stream": 0, "bulk": 0, "prefetch": 0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "one row": ({"m": 1, "n": 128, "k": 1024}, {}),
    "three rows, zero points, more steps than warps": (
        {"m": 3, "n": 96, "k": 1792, "zero_points": True},
        {"rows": 16, "warps_k": 2, "stages": 4, "prefetch": 2},
    ),
    "eight rows, groups of 64": ({"m": 8, "n": 128, "k": 640, "group": 64}, {"rows": 64, "warps_k": 2, "stages": 2}),
    "sixteen rows, bfloat16, groups of 32, rows beyond n, a cluster": (
        {"m": 16, "n": 112, "k": 1152, "zero_points": True, "group": 32, "dtype": "bfloat16"},
        {"warps_n": 2, "warps_k": 2, "split_k": 2},
    ),
    "seventeen rows, bias and residual, steps of 64": (
        {"m": 17, "n": 96, "k": 704, "group": 64, "zero_points": True, "epilogue": ("bias", "add")},
        {"warps_k": 3},
    ),
    "31 rows, scaled weights, a scale for each column, a cluster with a short end": (
        {"m": 31, "n": 128, "k": 1280, "scales": "column", "zero_points": True},
        {"rows": 64, "warps_n": 2, "warps_k": 2, "split_k": 4},
    ),
    "64 rows, scaled weights, groups of 32": ({"m": 64, "n": 64, "k": 512, "group": 32, "zero_points": True}, {"warps_k": 2}),
    "64 rows, groups of 256, bfloat16": ({"m": 60, "n": 64, "k": 1024, "group": 256, "dtype": "bfloat16"}, {"rows": 16, "warps_k": 2}),
    "three rows that come with each step": ({"m": 3, "n": 112, "k": 1152}, {"stream": 1, "warps_k": 2, "stages": 4}),
    "31 rows that come with steps of 64, a cluster": (
        {"m": 31, "n": 80, "k": 832, "group": 64, "zero_points": True, "epilogue": ("bias",)},
        {"stream": 1, "rows": 64, "warps_k": 3, "split_k": 2},
    ),
    "one row, in bulk, thread blocks that share rows, L2 prefetch": (
        {"m": 1, "n": 160, "k": 1024},
        {"bulk": 1, "rows": 64, "stream": 1, "warps_k": 4, "prefetch": 2},
    ),
    "nine rows, zero points, in bulk, a cluster, steps of 64": (
        {"m": 9, "n": 112, "k": 1344, "group": 32, "zero_points": True, "epilogue": ("bias", "add")},
        {"bulk": 1, "warps_n": 2, "split_k": 2},
    ),
    "bfloat16 in bulk, more steps than stages": (
        {"m": 3, "n": 80, "k": 2048, "dtype": "bfloat16", "zero_points": True},
        {"bulk": 1, "rows": 16, "stages": 2, "warps_k": 2, "stream": 1},
    ),
    "twelve rows that come in rounds, a cluster with uneven rounds": (
        {"m": 12, "n": 192, "k": 1408, "zero_points": True, "epilogue": ("bias",)},
        {"bulk": 1, "rows": 64, "warps_n": 2, "warps_k": 4, "split_k": 2, "stages": 2, "stream": 2},
    ),
    "three rows that come in rounds, bfloat16, steps of 64": (
        {"m": 3, "n": 80, "k": 704, "group": 64, "dtype": "bfloat16"},
        {"warps_n": 2, "warps_k": 3, "stages": 3, "stream": 2},
    ),
    "thirteen rows that stay, zero points, a cluster with a short end, rows beyond n": (
        {"m": 13, "n": 240, "k": 1920, "zero_points": True, "epilogue": ("bias",)},
        {"bulk": 1, "warps_n": 3, "warps_k": 2, "split_k": 4, "stages": 2, "stream": 3},
    ),
    "one row that stays, bfloat16, a warp for each tile": (
        {"m": 1, "n": 144, "k": 1024, "dtype": "bfloat16"},
        {"bulk": 1, "rows": 16, "warps_n": 9, "warps_k": 1, "split_k": 2, "stages": 4, "stream": 3, "prefetch": 2},
    ),
    "eight rows that stay, bfloat16, zero points, a thread block without a cluster": (
        {"m": 8, "n": 128, "k": 1536, "dtype": "bfloat16", "zero_points": True},
        {"bulk": 1, "rows": 64, "warps_n": 2, "warps_k": 4, "stages": 3, "stream": 3},
    ),
    "64 rows that stay, scaled weights, steps of 64": (
        {"m": 64, "n": 112, "k": 704, "group": 64},
        {"bulk": 1, "warps_n": 2, "warps_k": 2, "split_k": 2, "stages": 3, "stream": 3},
    ),
    "NVFP4, sixteen rows that stay": (
        {**NVFP4, "m": 16, "n": 128, "k": 1280},
        {"bulk": 1, "warps_n": 2, "warps_k": 2, "split_k": 2, "stages": 3, "stream": 3},
    ),
    "MXFP4 in bulk": ({**MXFP4, "m": 2, "n": 128, "k": 1024}, {"bulk": 1}),
    "MXFP4, one row": ({**MXFP4, "m": 1, "n": 128, "k": 1024}, {}),
    "MXFP4, bfloat16": ({**MXFP4, "m": 20, "n": 144, "k": 320, "dtype": "bfloat16", "epilogue": ("bias", "relu")}, {"warps_k": 2}),
    "NVFP4": ({**NVFP4, "m": 9, "n": 64, "k": 512, "epilogue": ("bias", "add")}, {"rows": 16, "warps_k": 2, "split_k": 2}),
    "NVFP4, bfloat16": ({**NVFP4, "m": 4, "n": 64, "k": 512, "dtype": "bfloat16", "tensor_scale": False}, {"rows": 64, "warps_k": 2}),
}
OF_EACH_KIND = (
    "one row, in bulk, thread blocks that share rows, L2 prefetch",
    "thirteen rows that stay, zero points, a cluster with a short end, rows beyond n",
)


def made(attrs: dict[str, Any], params: dict[str, Value], arch: Arch) -> Any:
    return gpu_matmul_packed.apply(canonical.lower(rule_of(attrs)), {**PLAIN, **params}, arch)


@needs_nvcc
@pytest.mark.parametrize("name", only(OF_EACH_KIND, CASES))
def test_computes_what_the_rule_does(name: str) -> None:
    attrs, params = CASES[name]
    mod = made(attrs, params, load_arch(ROOT, "h200"))
    assert mod is not None
    check(mod, rule_of(attrs), has_prefetch=bool(params.get("prefetch")))


@needs_nvcc
@pytest.mark.parametrize(
    ("gpu", "target", "attrs"),
    every(
        3,
        [("a100-80gb", "sm_80"), ("rtx-4090", "sm_89"), ("h200", "sm_90a")],
        [{"m": 1}, {"m": 8, "zero_points": True}, {"m": 4, "group": 64, "dtype": "bfloat16"}],
    ),
)
def test_the_first_choice_compiles_without_spills(gpu: str, target: str, attrs: dict[str, Any]) -> None:
    arch, sizes = load_arch(ROOT, gpu), {"n": 4096, "k": 4096, **attrs}
    proposals = policy.propose(iter_space(canonical.lower(rule_of(sizes))), arch, 100)
    first = next(each for each in proposals if each.candidate.template == "gpu_matmul_packed")
    mod = made(sizes, dict(first.candidate.params), arch)
    cubin = compiled_cubin(cuda_source(mod, arch, "kernel"), target, (*nvcc.FAST_MATH_FLAGS, *nvcc.TIRX_FLAGS))
    [usage] = cubin.usage.values()
    params = PackedParams(**dict(first.candidate.params))  # type: ignore[arg-type]
    assert usage.stack_bytes + usage.spill_bytes == 0
    assert usage.registers <= params.registers(packed_of(iter_space(canonical.lower(rule_of(sizes))))) + 8


@pytest.mark.parametrize(
    "attrs", at({0, 3}, [{"m": 1}, {"m": 16}, {"m": 33, "group": 64}, MXFP4 | {"m": 16}, NVFP4 | {"m": 8, "dtype": "bfloat16"}])
)
@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_the_template_takes_every_candidate(gpu: str, attrs: dict[str, Any]) -> None:
    arch, sizes = load_arch(ROOT, gpu), {"n": 2048, "k": 2048, **attrs}
    both = policy.propose(iter_space(canonical.lower(rule_of(sizes))), arch, 1000)
    proposals = [each for each in both if each.candidate.template == "gpu_matmul_packed"]
    assert proposals
    assert [each.predicted_secs for each in proposals] == sorted(each.predicted_secs for each in proposals)
    assert len({each.candidate for each in proposals}) == len(proposals)
    assert all(made(sizes, dict(each.candidate.params), arch) is not None for each in (*proposals[:2], proposals[-1]))


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"m": 8, "layout": "rows"}, {}),
        ({"m": 8, "scales": "tensor"}, {}),
        ({"m": 8, "dtype": "int8"}, {}),
        ({"m": 65}, {"rows": 16}),
        ({"m": 64}, {"rows": 64}),  # too many accumulators
        ({"m": 8}, {"rows": 48}),
        ({"m": 8}, {"stages": 1}),
        ({"m": 8}, {"warps_k": 5}),  # more than steps
        ({"m": 8}, {"split_k": 3, "warps_k": 1}),  # the last one has none
        ({"m": 8}, {"warps_n": 16}),
        ({"m": 8}, {"warps_n": 2, "stream": 1}),
        ({"m": 8}, {"rows": 64, "warps_n": 4, "warps_k": 1}),  # more rows than there are
        ({"m": 8}, {"bulk": 2}),
        ({"m": 8}, {"stream": 3}),
        ({"m": 8}, {"prefetch": 4}),  # more than stages
    ],
)
def test_does_not_apply(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert made({"n": 128, "k": 512, **attrs}, params, load_arch(ROOT, "h200")) is None


def test_other_gpus_have_no_asynchronous_or_bulk_copies_or_clusters() -> None:
    sizes = {"m": 8, "n": 128, "k": 512}
    assert made(sizes, {}, load_arch(ROOT, "t4")) is None
    assert policy.propose(iter_space(canonical.lower(rule_of(sizes))), load_arch(ROOT, "t4"), 8) == ()
    assert made(sizes, {}, load_arch(ROOT, "a100-80gb")) is not None
    assert made(sizes, {"split_k": 2, "warps_k": 2}, load_arch(ROOT, "a100-80gb")) is None
    assert made(sizes, {"bulk": 1}, load_arch(ROOT, "a100-80gb")) is None


def test_both_policies_compete() -> None:
    for m, first in ((1, "gpu_gemv_packed"), (256, "wgmma_matmul_quantized")):
        space = iter_space(canonical.lower(rule_of({"m": m, "n": 8192, "k": 8192})))
        templates = [each.candidate.template for each in gpu_matmul_quantized.propose(space, load_arch(ROOT, "h200"), 6)]
        assert len(templates) == 6
        assert templates[0] == first
        assert len(set(templates)) == (3 if m == 1 else 1)  # the form that is neither persistent nor a GEMV comes later
    assert gpu_matmul_quantized.propose(space, load_arch(ROOT, "a100-80gb"), 6) == ()


@needs_nvcc
@pytest.mark.parametrize(("attrs", "dtype"), every(2, [MXFP4, NVFP4 | {"tensor_scale": False}], ["float16", "bfloat16"]))
def test_every_code_meets_every_scale(attrs: dict[str, Any], dtype: str) -> None:
    """Each result is one weight, of one row of A; NaN among a row's weights makes all sums with it NaN."""
    group, n, k = attrs["group"], 512, 128
    numbers = np.where(np.arange(16) > 7, -1, 1) * NUMBERS[np.arange(16) & 7]
    codes = np.zeros((n, k), np.uint8)
    codes[:, :16] = np.arange(16)
    # Each row has a scale for its first group; those of the others are 1.
    bits = np.full((k // group, n), 127 if group == 32 else 0x38, np.uint8)
    bits[0] = np.arange(n) % 256
    stored = bits if group == 32 else bits.view(numpy_dtype("float8_e4m3fn"))
    packed = load_rule(ROOT, "pack_weights")(n=n, k=k).reference(codes[:, ::2] | codes[:, 1::2] << 4)
    a = np.eye(16, k).astype(numpy_dtype(dtype))

    mod = made({**attrs, "m": 16, "n": n, "k": k, "dtype": dtype, "out_dtype": "float32"}, {"warps_k": 1}, load_arch(ROOT, "h200"))
    result = Kernel(mod["main"])(a, np.asarray(packed), stored, np.full((16, n), np.nan, np.float32))[-1]

    scales = bits[0].view(numpy_dtype("float8_e8m0fnu" if group == 32 else "float8_e4m3fn")).astype(np.float64)
    with np.errstate(all="ignore"):
        weights = (numbers[:, np.newaxis] * scales).astype(np.float32)
    is_finite = np.isfinite(weights).all(axis=0)
    assert is_finite.sum() > n * 0.9
    is_tiny = np.abs(scales) <= 2.0**-120  # sums of such weights may become zero
    assert np.array_equal(result[:, is_finite & ~is_tiny], weights[:, is_finite & ~is_tiny])
    assert np.abs(result[:, is_tiny]).max(initial=0) < 2.0**-110
    assert np.isnan(result[:, np.isnan(scales)]).all()


NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""What the last three bits of a code of float4_e2m1fn stand for (OCP Microscaling Formats 1.0, table 5)."""
