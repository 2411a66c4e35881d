"""Persistent kernels of GEMMs of few rows with packed weights compute what the rule does, on the CPU, and compile without spills."""

from __future__ import annotations

from typing import Any

import pytest
from support.compilers import compiled_cubin, needs_nvcc
from support.packed_kernels import check, rule_of
from support.repository import REPOSITORY
from support.thinned import at, only

from kerneldecl.analysis.matmul_packed import packed_of
from kerneldecl.analysis.matmul_packed_persistent import PersistentParams
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Proposal, Value
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import gpu_matmul_packed as policy
from kerneldecl.templates import gpu_matmul_packed_persistent
from kerneldecl.toolchain import nvcc

ROOT = REPOSITORY
PLAIN: dict[str, Value] = {
    "rows": 16, "step": 128, "warps": 4, "tiles": 3, "stages": 5, "held": 3, "split_k": 1, "bulk": 0, "prefetch": 0, "cover": 0,
}  # fmt: skip
MXFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16, "tensor_scale": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "one row": ({"m": 1, "n": 128, "k": 1024}, {}),
    "one row in bulk, L2 prefetch across tiles, more stages than steps of a tile": (
        {"m": 1, "n": 112, "k": 1024},
        {"bulk": 1, "prefetch": 3, "stages": 7, "tiles": 4, "held": 4},
    ),
    "three rows, zero points, the last warp has fewer steps": (
        {"m": 3, "n": 80, "k": 1408, "zero_points": True},
        {"tiles": 2, "held": 2, "prefetch": 2, "cover": 1},
    ),
    "three rows in bulk, the last warp has no steps, partial results of one tile at a time": (
        {"m": 3, "n": 80, "k": 1152, "zero_points": True},
        {"bulk": 1, "tiles": 5, "held": 1, "stages": 8, "prefetch": 2},
    ),
    "eight rows, tiles of 32 that share rows, groups of 64, bias": (
        {"m": 8, "n": 112, "k": 1280, "group": 64, "epilogue": ("bias",)},
        {"rows": 32, "stages": 6, "tiles": 3, "held": 2, "cover": 1},
    ),
    "eight rows, bfloat16, steps of 256 in bulk, zero points": (
        {"m": 8, "n": 96, "k": 2048, "dtype": "bfloat16", "zero_points": True, "group": 32},
        {"step": 256, "stages": 5, "bulk": 1},
    ),
    "thirteen rows, a cluster, bias and residual": (
        {"m": 13, "n": 112, "k": 1024, "epilogue": ("bias", "add")},
        {"split_k": 2, "stages": 8, "tiles": 3, "held": 2, "warps": 2},
    ),
    "sixteen rows, bfloat16, a cluster of which the last warp has fewer steps, in bulk, sums at the end": (
        {"m": 16, "n": 80, "k": 1408, "dtype": "bfloat16"},
        {"split_k": 2, "stages": 14, "tiles": 2, "held": 2, "warps": 2, "bulk": 1},
    ),
    "five rows, steps of 64, a scale for each column, tiles of 32": (
        {"m": 5, "n": 64, "k": 1344, "scales": "column", "zero_points": True},
        {"step": 64, "rows": 32, "tiles": 2, "held": 2, "warps": 6, "stages": 6},
    ),
    "MXFP4, ten rows, bias": ({**MXFP4, "m": 10, "n": 80, "k": 1024, "epilogue": ("bias",)}, {"prefetch": 2, "stages": 8}),
    "MXFP4, bfloat16, tiles of 32, an uneven cluster": (
        {**MXFP4, "m": 3, "n": 112, "k": 1408, "dtype": "bfloat16"},
        {"rows": 32, "split_k": 2, "bulk": 1, "stages": 6, "held": 1},
    ),
    "NVFP4, steps of 256": ({**NVFP4, "m": 1, "n": 80, "k": 2048}, {"step": 256, "bulk": 1}),
    "NVFP4, bfloat16": ({**NVFP4, "m": 8, "n": 64, "k": 576, "dtype": "bfloat16", "tensor_scale": False}, {"step": 64, "stages": 9}),
    "one row, interleaved steps of tiles of 32, of which the last warps have fewer": (
        {"m": 1, "n": 112, "k": 1408, "zero_points": True},
        {"interleave": 1, "rows": 32, "tiles": 2, "held": 2, "prefetch": 2},
    ),
    "three rows, interleaved steps in bulk, longer groups, a cluster, the last warp has no steps": (
        {"m": 3, "n": 80, "k": 1536, "group": 512, "dtype": "bfloat16"},
        {"interleave": 1, "step": 256, "warps": 2, "split_k": 2, "bulk": 1, "stages": 6},
    ),
    "groups of 512, longer than a warp's slice": ({"m": 2, "n": 48, "k": 1024, "group": 512}, {"step": 64}),
}  # fmt: skip
OF_EACH_KIND = (
    "sixteen rows, bfloat16, a cluster of which the last warp has fewer steps, in bulk, sums at the end",
    "three rows, interleaved steps in bulk, longer groups, a cluster, the last warp has no steps",
)


def made(attrs: dict[str, Any], params: dict[str, Value], arch: Arch) -> Any:
    return gpu_matmul_packed_persistent.apply(canonical.lower(rule_of(attrs)), {**PLAIN, **params}, arch)


@needs_nvcc
@pytest.mark.parametrize("name", only(OF_EACH_KIND, CASES))
def test_computes_what_the_rule_does(name: str) -> None:
    attrs, params = CASES[name]
    mod = made(attrs, params, load_arch(ROOT, "h200"))
    assert mod is not None
    check(mod, rule_of(attrs), has_prefetch=bool(params.get("prefetch")))


def proposed(attrs: dict[str, Any], gpu: str, top_k: int) -> list[Proposal]:
    """Return the persistent kernels among the proposals."""
    found = policy.propose(iter_space(canonical.lower(rule_of(attrs))), load_arch(ROOT, gpu), top_k)
    return [each for each in found if each.candidate.template == "gpu_matmul_packed_persistent"]


@needs_nvcc
@pytest.mark.parametrize(
    ("gpu", "target", "attrs"),
    at(
        {1, 3},
        [
            ("a100-80gb", "sm_80", {"m": 1}),
            ("a100-80gb", "sm_80", {"m": 4, "group": 64, "dtype": "bfloat16"}),
            ("h200", "sm_90a", {"m": 1}),
            ("h200", "sm_90a", {"m": 8, "zero_points": True}),
            ("h200", "sm_90a", {"m": 16}),
        ],
    ),
)
def test_the_first_choice_compiles_without_spills(gpu: str, target: str, attrs: dict[str, Any]) -> None:
    arch, sizes = load_arch(ROOT, gpu), {"n": 8192, "k": 8192, **attrs}
    first, *_ = proposed(sizes, gpu, 100)
    mod = made(sizes, dict(first.candidate.params), arch)
    cubin = compiled_cubin(cuda_source(mod, arch, "kernel"), target, (*nvcc.FAST_MATH_FLAGS, *nvcc.TIRX_FLAGS))
    [usage] = cubin.usage.values()
    params = PersistentParams(**dict(first.candidate.params))  # type: ignore[arg-type]
    assert usage.stack_bytes + usage.spill_bytes == 0
    assert usage.registers <= params.registers(packed_of(iter_space(canonical.lower(rule_of(sizes))))) + 8


@pytest.mark.parametrize(
    "attrs", at({1}, [{"m": 1}, {"m": 16, "dtype": "bfloat16"}, {"m": 3, "k": 2112, "group": 64, "zero_points": True}])
)
@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_the_template_takes_every_candidate(gpu: str, attrs: dict[str, Any]) -> None:
    sizes = {"n": 8192, "k": 2048, **attrs}
    proposals = proposed(sizes, gpu, 1000)
    assert proposals
    assert [each.predicted_secs for each in proposals] == sorted(each.predicted_secs for each in proposals)
    assert len({each.candidate for each in proposals}) == len(proposals)
    assert all(made(sizes, dict(each.candidate.params), load_arch(ROOT, gpu)) is not None for each in (*proposals[:2], proposals[-1]))


@pytest.mark.parametrize("m", [1, 8, 16])
def test_most_proposals_for_one_row_besides_gemvs_are_persistent_and_differ_and_some_for_more(m: int) -> None:
    # One of two of the first proposals for one row is a GEMV, one in six of the others is not persistent.
    proposals = proposed({"m": m, "n": 8192, "k": 8192}, "h200", 12 if m == 1 else 18)
    # Thread blocks wait for more rows of activations, so that other kernels come first.
    assert len(proposals) == (5 if m == 1 else 3)
    if m == 1:
        proposals = proposed({"m": m, "n": 8192, "k": 8192}, "h200", 24)
        assert len({tuple(dict(each.candidate.params)[name] for name in ("rows", "step", "split_k")) for each in proposals}) > 3
        assert len({dict(each.candidate.params)["stages"] for each in proposals}) > 2
    # With too few rows of weights a thread block has one tile, and nothing to keep activations for.
    assert not proposed({"m": m, "n": 128, "k": 8192}, "h200", 100)


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"m": 8, "layout": "rows"}, {}),
        ({"m": 8, "scales": "tensor"}, {}),
        ({"m": 17}, {}),
        ({"m": 8}, {"rows": 64}),
        ({"m": 8}, {"step": 32}),
        ({"m": 8, "k": 576, "group": 64}, {"step": 128}),  # does not divide k
        ({"m": 8}, {"stages": 1}),
        ({"m": 8}, {"stages": 25}),
        ({"m": 8}, {"warps": 5}),  # more than steps
        ({"m": 8}, {"split_k": 8, "warps": 1}),  # more than steps
        ({"m": 8}, {"tiles": 9, "held": 9}),  # more than there are
        ({"m": 8}, {"held": 4}),
        ({"m": 8}, {"held": 0}),
        ({"m": 8}, {"bulk": 2}),
        ({"m": 8}, {"interleave": 2}),
        ({"m": 8}, {"prefetch": 5}),  # more than stages
        ({"m": 1, "k": 1024}, {"cover": 1}),  # activations leave all stages free that come first
        ({"m": 16, "k": 1024}, {"warps": 4, "stages": 6}),  # activations fill all stages
        ({"m": 8, "k": 8192}, {"warps": 4, "stages": 24}),  # more activations than registers
    ],
)
def test_does_not_apply(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert made({"n": 128, "k": 512, **attrs}, params, load_arch(ROOT, "h200")) is None


def test_other_gpus_have_no_asynchronous_or_bulk_copies_or_clusters() -> None:
    sizes = {"m": 8, "n": 128, "k": 512}
    assert made(sizes, {}, load_arch(ROOT, "t4")) is None
    assert made(sizes, {}, load_arch(ROOT, "a100-80gb")) is not None
    assert made(sizes, {"split_k": 2, "warps": 2}, load_arch(ROOT, "a100-80gb")) is None
    assert made(sizes, {"bulk": 1}, load_arch(ROOT, "a100-80gb")) is None
