"""The kernels of quantised GEMMs on wgmma compute what the rule does, on the CPU, and compile without spills."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import Kernel
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at, every, only
from support.wgmma_cases import SMS

from kerneldecl.arrays import numpy_dtype, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Proposal, Value
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.rule import Rule

ROOT = REPOSITORY
PACKED = {"layout": "packed"}
MXFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16, "tensor_scale": True}
FLOAT8 = {"weights": "float8_e4m3fn", "dtype": "float8_e4m3fn", "scales": "block", "activation_scales": "group"}
INT8 = {"weights": "int8", "dtype": "int8"}
COLUMNS = {**INT8, "scales": "group"}
"""A scale for each column and group of k."""
W4A8 = {**PACKED, "dtype": "int8", "activation_scales": "token"}
PLAIN = {"block_m": 64, "consumers": 1, "stages": 4, "cluster_m": 1, "raster_group": 1, "split_k": 1, "pdl": 0, "workspace": 0}
INT4 = {**PLAIN, "block_n": 8, "block_k": 64}
SCALED = {**PLAIN, "block_n": 64, "partials": 2, "cluster_n": 1}
UNPACKED = {**PLAIN, "block_n": 16, "partials": 2}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "quantized": (PACKED, INT4),
    "block_scaled": (FLOAT8, SCALED),
    "quantized_int8": (W4A8, UNPACKED),
}
"""Attributes and parameters that the cases of a kind begin with."""

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Value]]] = {
    "one row": ("quantized", {"m": 1, "n": 128, "k": 256}, {}),
    "one row, k-tiles of 128": ("quantized", {"m": 1, "n": 128, "k": 512}, {"block_k": 128}),
    "groups of 64, bias and residual, odd k-tiles": (
        "quantized",
        {"m": 17, "n": 192, "k": 320, "group": 64, "epilogue": ("bias", "add")},
        {"block_m": 128, "block_n": 16, "consumers": 2},
    ),
    "bfloat16, zero points, groups of 32, two MMA tiles, split-K": (
        "quantized",
        {"m": 70, "n": 256, "k": 512, "zero_points": True, "group": 32, "dtype": "bfloat16"},
        {"block_m": 256, "block_n": 72, "consumers": 2, "split_k": 2, "stages": 3},
    ),
    "a scale for each column, fewer columns than a tile, PDL": (
        "quantized",
        {"m": 3, "n": 96, "k": 256, "scales": "column", "zero_points": True},
        {"pdl": 1},
    ),
    "workspace": ("quantized", {"m": 40, "n": 128, "k": 512}, {"block_m": 128, "block_n": 64, "split_k": 3, "workspace": 1}),
    "k-tiles of 128, two scales in each, split-K": (
        "quantized",
        {"m": 30, "n": 192, "k": 640, "group": 64, "zero_points": True},
        {"block_m": 128, "block_n": 32, "consumers": 2, "block_k": 128, "split_k": 2, "stages": 3},
    ),
    "bfloat16, k-tiles of 128, four scales in each": (
        "quantized",
        {"m": 70, "n": 256, "k": 512, "group": 32, "dtype": "bfloat16", "epilogue": ("bias", "relu")},
        {"block_m": 128, "block_n": 80, "consumers": 2, "stages": 3, "block_k": 128},
    ),
    "zero points of 192 rows": (
        "quantized",
        {"m": 40, "n": 384, "k": 512, "zero_points": True},
        {"block_m": 192, "block_n": 40, "consumers": 3},
    ),
    "four consumers, workspace": (
        "quantized",
        {"m": 61, "n": 512, "k": 640, "epilogue": ("bias", "relu")},
        {"block_m": 256, "block_n": 64, "consumers": 4, "block_k": 128, "split_k": 2, "workspace": 1, "stages": 3, "pdl": 1},
    ),
    "four consumers, split-K": (
        "quantized",
        {"m": 30, "n": 320, "k": 512, "zero_points": True},
        {"block_m": 256, "block_n": 32, "consumers": 4, "split_k": 2, "stages": 3},
    ),
    "MXFP4, one row": ("quantized", {**MXFP4, "m": 1, "n": 128, "k": 256}, {}),
    "MXFP4, bfloat16, k-tiles of 128, two MMA tiles, split-K": (
        "quantized",
        {**MXFP4, "m": 70, "n": 256, "k": 512, "dtype": "bfloat16", "epilogue": ("bias", "relu")},
        {"block_m": 256, "block_n": 72, "consumers": 2, "split_k": 2, "stages": 3, "block_k": 128},
    ),
    "NVFP4, bias and residual, odd k-tiles": (
        "quantized",
        {**NVFP4, "m": 17, "n": 192, "k": 320, "epilogue": ("bias", "add")},
        {"block_m": 128, "block_n": 16, "consumers": 2},
    ),
    "NVFP4, bfloat16, k-tiles of 128, workspace, without a scale of the tensor": (
        "quantized",
        {**NVFP4, "m": 40, "n": 128, "k": 1024, "dtype": "bfloat16", "tensor_scale": False},
        {"block_m": 128, "block_n": 64, "split_k": 3, "workspace": 1, "block_k": 128},
    ),
    "NVFP4, multicast, PDL": (
        "quantized",
        {**NVFP4, "m": 100, "n": 256, "k": 512},
        {"block_m": 128, "block_n": 64, "consumers": 2, "cluster_m": 2, "stages": 3, "block_k": 128, "pdl": 1},
    ),
    "multicast, workspace, bfloat16, uneven parts, an odd number of tiles": (
        "quantized",
        {"m": 37, "n": 320, "k": 640, "dtype": "bfloat16", "zero_points": True, "epilogue": ("bias",)},
        {
            "block_m": 128,
            "block_n": 64,
            "consumers": 2,
            "cluster_m": 2,
            "stages": 3,
            "block_k": 128,
            "pdl": 1,
            "split_k": 2,
            "workspace": 1,
        },
    ),
    "split-K in a cluster of four, a short last part": (
        "quantized",
        {"m": 64, "n": 256, "k": 832, "group": 64},
        {"block_m": 128, "block_n": 64, "consumers": 2, "stages": 3, "pdl": 1, "split_k": 4},
    ),
    "multicast": (
        "quantized",
        {"m": 100, "n": 256, "k": 512, "group": 256},
        {"block_m": 128, "block_n": 64, "consumers": 2, "cluster_m": 2, "stages": 3, "block_k": 128},
    ),
    "multicast, workspace": (
        "quantized",
        {"m": 40, "n": 384, "k": 512},
        {"block_m": 128, "block_n": 64, "cluster_m": 2, "split_k": 3, "workspace": 1, "pdl": 1},
    ),
    "float8, multicast, workspace": (
        "block_scaled",
        {"m": 132, "n": 256, "k": 1024},
        {"block_m": 128, "block_n": 64, "consumers": 2, "cluster_n": 2, "split_k": 3, "workspace": 1, "stages": 3, "pdl": 1},
    ),
    "float8": ("block_scaled", {"m": 72, "n": 128, "k": 384}, {}),
    "float8, odd sizes, bias and residual": (
        "block_scaled",
        {"m": 132, "n": 320, "k": 512, "epilogue": ("bias", "add")},
        {"block_m": 128, "block_n": 128, "consumers": 2, "stages": 3},
    ),
    "e5m2, three consumers": (
        "block_scaled",
        {"m": 200, "n": 192, "k": 640, "weights": "float8_e5m2", "dtype": "float8_e5m2"},
        {"block_m": 192, "block_n": 128, "consumers": 3, "stages": 3, "partials": 1},
    ),
    "float8, multicast": (
        "block_scaled",
        {"m": 256, "n": 256, "k": 384, "out_dtype": "float16"},
        {"block_m": 128, "block_n": 128, "consumers": 2, "stages": 3, "partials": 1, "cluster_m": 2, "pdl": 1},
    ),
    "float8, two MMA tiles, columns of two blocks": (
        "block_scaled",
        {"m": 256, "n": 224, "k": 1280, "epilogue": ("bias", "add")},
        {"block_m": 256, "block_n": 112, "consumers": 2, "stages": 3, "partials": 1, "cluster_n": 2, "kernel_schedule": "staggered"},
    ),
    "float8, staggered, several tiles": (
        "block_scaled",
        {"m": 384, "n": 384, "k": 1152},
        {"block_m": 128, "block_n": 128, "consumers": 2, "stages": 4, "kernel_schedule": "staggered"},
    ),
    "float8, tiles wider than a block": (
        "block_scaled",
        {"m": 132, "n": 480, "k": 384},
        {"block_m": 128, "block_n": 160, "consumers": 2, "stages": 3, "partials": 1},
    ),
    "float8, chains of k-tiles, columns of two blocks, split-K": (
        "block_scaled",
        {"m": 64, "n": 168, "k": 2432},
        {"block_n": 56, "split_k": 2},
    ),
    "float8, one row, split-K": ("block_scaled", {"m": 1, "n": 128, "k": 1024}, {"split_k": 2, "pdl": 1}),
    "float8, any number of rows, two MMA tiles": (
        "block_scaled",
        {"m": 70, "n": 224, "k": 1280, "epilogue": ("bias", "add")},
        {"block_m": 128, "block_n": 112, "stages": 3, "partials": 1},
    ),
    "float8, any number of rows, several tiles, multicast": (
        "block_scaled",
        {"m": 301, "n": 224, "k": 512},
        {"block_m": 128, "block_n": 112, "consumers": 2, "stages": 3, "cluster_n": 2},
    ),
    "float8, weights streamed, split-K in place": (
        "block_scaled",
        {"m": 64, "n": 224, "k": 2048},
        {"block_n": 112, "split_k": 2, "stages": 9, "pdl": 1, "prefetch": 3, "l2_fetch": 256},
    ),
    "float8, weights streamed, more prefetched than there is, split-K of uneven shares": (
        "block_scaled",
        {"m": 132, "n": 112, "k": 1280, "epilogue": ("bias", "add")},
        {"block_m": 128, "consumers": 2, "block_n": 112, "split_k": 3, "pdl": 1, "prefetch": 12},
    ),
    "int8": ("block_scaled", {**INT8, "m": 72, "n": 128, "k": 384}, {}),
    "int8, odd sizes, bias and residual": (
        "block_scaled",
        {**INT8, "m": 131, "n": 333, "k": 512, "epilogue": ("bias", "add")},
        {"block_m": 128, "block_n": 128, "consumers": 2, "stages": 3},
    ),
    "int8, a scale for each column and group": ("block_scaled", {**COLUMNS, "m": 72, "n": 128, "k": 384}, {}),
    "int8, columns, one group, any number of rows, float16": (
        "block_scaled",
        {**COLUMNS, "m": 3, "n": 72, "k": 128, "out_dtype": "float16"},
        {"block_n": 64, "stages": 3},
    ),
    "int8, columns, odd sizes, chains of k-tiles": (
        "block_scaled",
        {**COLUMNS, "m": 77, "n": 97, "k": 1280, "epilogue": ("bias", "relu")},
        {"block_n": 96},
    ),
    "int8, columns, two MMA tiles, tiles of 112 columns, several tiles, multicast, staggered": (
        "block_scaled",
        {**COLUMNS, "m": 520, "n": 332, "k": 1152, "epilogue": ("bias", "add")},
        {"block_m": 256, "block_n": 112, "consumers": 2, "stages": 3, "partials": 1, "cluster_n": 2, "kernel_schedule": "staggered"},
    ),
    "int8, columns, odd sizes, two MMA tiles, several tiles": (
        "block_scaled",
        {**COLUMNS, "m": 301, "n": 225, "k": 512},
        {"block_m": 256, "block_n": 96, "consumers": 2, "stages": 3, "partials": 1},
    ),
    "int8, columns, three consumers, groups of 256": (
        "block_scaled",
        {**COLUMNS, "m": 200, "n": 192, "k": 768, "group": 256},
        {"block_m": 192, "block_n": 128, "consumers": 3, "stages": 3, "partials": 1},
    ),
    "int8, columns, weights streamed, split-K in place of uneven shares": (
        "block_scaled",
        {**COLUMNS, "m": 64, "n": 224, "k": 1280},
        {"block_n": 112, "split_k": 3, "stages": 9, "pdl": 1, "prefetch": 3, "l2_fetch": 256},
    ),
    "int8, columns, a scale for each token": (
        "block_scaled",
        {**COLUMNS, "m": 131, "n": 128, "k": 1024, "activation_scales": "token"},
        {"block_m": 128, "consumers": 2, "block_n": 128, "stages": 3},
    ),
    "int8, blocks, tokens, two MMA tiles, workspace": (
        "block_scaled",
        {**INT8, "m": 132, "n": 256, "k": 1024, "activation_scales": "token"},
        {"block_m": 256, "block_n": 64, "consumers": 2, "partials": 1, "split_k": 3, "workspace": 1, "stages": 3, "pdl": 1},
    ),
    "float8, a scale for each column and group, and for each token": (
        "block_scaled",
        {"m": 72, "n": 132, "k": 512, "scales": "group", "activation_scales": "token"},
        {"block_m": 128, "block_n": 64, "consumers": 2},
    ),
    "int4 by int8, one row": ("quantized_int8", {"m": 1, "n": 128, "k": 128}, {"stages": 3}),
    "int4 by int8, odd rows, chains of k-tiles, float16, bias and residual": (
        "quantized_int8",
        {"m": 37, "n": 208, "k": 1280, "out_dtype": "float16", "epilogue": ("bias", "add")},
        {"block_m": 128, "block_n": 48, "consumers": 2},
    ),
    "int4 by int8, two MMA tiles, groups of 256, several tiles, multicast": (
        "quantized_int8",
        {"m": 301, "n": 528, "k": 768, "group": 256},
        {"block_m": 256, "block_n": 64, "consumers": 2, "partials": 1, "cluster_m": 2, "pdl": 1},
    ),
    "int4 by int8, split-K in a cluster": (
        "quantized_int8",
        {"m": 16, "n": 256, "k": 1280},
        {"block_m": 128, "consumers": 2, "split_k": 3},
    ),
    "int4 by int8, a scale for each column, two MMA tiles": (
        "quantized_int8",
        {"m": 70, "n": 272, "k": 1152, "scales": "column", "epilogue": ("bias",)},
        {"block_m": 256, "block_n": 80, "consumers": 2, "partials": 1},
    ),
    "int4 by int8, a scale for each column, activations of groups": (
        "quantized_int8",
        {"m": 13, "n": 144, "k": 512, "scales": "column", "activation_scales": "group"},
        {},
    ),
    "int8, a scale for each whole column, rows of groups": (
        "block_scaled",
        {**INT8, "m": 133, "n": 97, "k": 512, "scales": "column"},
        {"block_m": 128, "block_n": 96, "consumers": 2},
    ),
    "int4 by int8, activations of groups, workspace": (
        "quantized_int8",
        {"m": 66, "n": 192, "k": 1024, "activation_scales": "group", "epilogue": ("bias", "relu")},
        {"block_n": 80, "split_k": 3, "workspace": 1, "pdl": 1},
    ),
    "float8, split-K": ("block_scaled", {"m": 64, "n": 128, "k": 1024}, {"split_k": 2, "block_n": 32}),
}
OF_EACH_KIND = (
    "bfloat16, zero points, groups of 32, two MMA tiles, split-K",
    "NVFP4, bias and residual, odd k-tiles",
    "float8, odd sizes, bias and residual",
    "int4 by int8, odd rows, chains of k-tiles, float16, bias and residual",
    "int8, columns, odd sizes, chains of k-tiles",
    "int8, columns, a scale for each token",
)
SIZES = ((1, 4096, 4096), (16, 8192, 8192), (64, 512, 1024), (256, 8192, 8192), (4096, 4096, 4096))


def the_gpu(sm_count: int = SMS) -> Arch:
    arch = load_arch(ROOT, "h200")
    return replace(arch, gpu=replace(arch.the_gpu, sm_count=sm_count))


def rule_of(kind: str, attrs: dict[str, Any]) -> Rule:
    rule = load_rule(ROOT, "matmul_quantized").of(ROOT, {**KINDS[kind][0], **attrs})
    assert not list(rule.problems())
    return rule


def made(kind: str, attrs: dict[str, Any], params: dict[str, Value], arch: Arch | None = None) -> Any:
    template = load_module("templates", ROOT, f"wgmma_matmul_{kind}")
    given = {**KINDS[kind][1], **params}
    return template.apply(canonical.lower(rule_of(kind, attrs)), given, arch or the_gpu())


@needs_nvcc
@pytest.mark.parametrize("name", only(OF_EACH_KIND, CASES))
def test_computes_what_the_rule_does(name: str) -> None:
    kind, attrs, params = CASES[name]
    rule, mod = rule_of(kind, attrs), made(kind, attrs, params)
    assert mod is not None
    kernel = Kernel(mod["main"])
    [out] = rule.signature().outputs
    inputs = rule.inputs(np.random.default_rng(1))
    result = kernel(*inputs, np.full(out.shape, np.nan).astype(numpy_dtype(out.dtype)))[-1]
    assert relative_error(result, np.asarray(rule.reference(*inputs))) <= rule.tolerance()
    # nvcc.compile_cubin refuses code in which wgmma waits after each instruction.
    assert not any(each.spill_bytes for each in compiled_cubin(kernel.source, "sm_90a").usage.values())


@pytest.mark.parametrize(("kind", "size"), at({1, 7}, itertools.product(["quantized", "block_scaled"], SIZES)))
def test_the_template_takes_every_candidate(kind: str, size: tuple[int, int, int]) -> None:
    takes_every_candidate(kind, dict(zip("mnk", size, strict=True)))


@pytest.mark.parametrize("attrs", at({1}, [MXFP4 | {"m": 16}, NVFP4 | {"m": 300, "dtype": "bfloat16"}]), ids=["MXFP4", "NVFP4"])
def test_the_template_takes_every_candidate_of_blocks(attrs: dict[str, Any]) -> None:
    takes_every_candidate("quantized", {"n": 4096, "k": 4096, **attrs})


@pytest.mark.parametrize(
    "attrs",
    at(
        {0},
        [{"m": 1024}, {"m": 64, "n": 8191}, {"m": 300, "k": 4224}, {"m": 4096, "activation_scales": "token"}, {"m": 1, "scales": "block"}],
    ),
    ids=str,
)
def test_the_template_takes_every_candidate_of_int8(attrs: dict[str, Any]) -> None:
    takes_every_candidate("block_scaled", {**COLUMNS, "n": 8192, "k": 8192, **attrs})


@pytest.mark.parametrize(
    "attrs",
    at({0}, [{"m": 16}, {"m": 1}, {"m": 300, "n": 8208}, {"m": 1024, "activation_scales": "group"}, {"m": 64, "group": 256}]),
    ids=str,
)
def test_the_template_takes_every_candidate_of_int4_by_int8(attrs: dict[str, Any]) -> None:
    takes_every_candidate("quantized_int8", {"n": 8192, "k": 8192, **attrs})


@pytest.mark.parametrize("m", at({0}, [1, 64, 128]))
def test_few_rows_are_tried_in_several_ways_where_weights_come_from_dram(m: int) -> None:
    params = [dict(each.candidate.params) for each in proposed({"m": m, "n": 7168, "k": 16384}, 20)]
    shapes = {tuple(each[name] for name in ("block_n", "stages", "split_k", "workspace")) for each in params}
    assert len(shapes) >= 5
    assert {"prefetch" in each for each in params} == {False, True}
    assert {each.get("l2_fetch", 128) for each in params} == {128, 256}
    assert all(made("block_scaled", {"m": m, "n": 7168, "k": 16384}, each, the_gpu(132)) is not None for each in params[::6])


@pytest.mark.parametrize("attrs", [{"m": 4096, "n": 7168, "k": 16384}, {"m": 64, "n": 2048, "k": 2048}], ids=str)
def test_others_stream_no_weights(attrs: dict[str, Any]) -> None:
    assert not any({"prefetch", "l2_fetch"} & {*dict(each.candidate.params)} for each in proposed(attrs, 20))


def proposed(attrs: dict[str, Any], top_k: int) -> tuple[Proposal, ...]:
    policy = load_module("policies", ROOT, "wgmma_matmul_block_scaled")
    return tuple(policy.propose(iter_space(canonical.lower(rule_of("block_scaled", attrs))), the_gpu(132), top_k))


def takes_every_candidate(kind: str, attrs: dict[str, Any]) -> None:
    policy, arch = load_module("policies", ROOT, f"wgmma_matmul_{kind}"), the_gpu(132)
    proposals = policy.propose(iter_space(canonical.lower(rule_of(kind, attrs))), arch, 4)
    assert len(proposals) == 4
    assert [each.predicted_secs for each in proposals] == sorted(each.predicted_secs for each in proposals)
    assert all(made(kind, attrs, dict(each.candidate.params), arch) is not None for each in proposals[:2])


@pytest.mark.parametrize(
    ("kind", "attrs", "params"),
    [
        ("quantized", {"m": 8, "n": 128, "k": 256, "layout": "rows"}, {}),
        ("quantized", {"m": 8, "n": 128, "k": 256, "scales": "tensor"}, {}),
        ("quantized", {**MXFP4, "m": 8, "n": 128, "k": 256, "layout": "rows"}, {}),
        ("quantized", {**NVFP4, "m": 8, "n": 128, "k": 256, "dtype": "int8"}, {}),
        ("quantized", {"m": 8, "n": 128, "k": 320, "group": 64}, {"block_k": 128}),  # no whole k-tiles
        ("quantized", {"m": 8, "n": 128, "k": 256}, {"block_k": 256}),
        ("quantized", {"m": 8, "n": 128, "k": 256}, {"stages": 20}),
        ("block_scaled", {"m": 64, "n": 128, "k": 256, "activation_scales": "token", "scales": "column"}, {}),
        ("block_scaled", {"m": 64, "n": 128, "k": 256, "scales": "group", "group": 64}, {}),
        ("block_scaled", {"m": 64, "n": 128, "k": 256, "weights": "int8"}, {}),
        ("block_scaled", {**COLUMNS, "m": 64, "n": 128, "k": 256, "zero_points": True}, {}),
        ("block_scaled", {**COLUMNS, "m": 64, "n": 112, "k": 256}, {"block_n": 56}),  # wgmma takes no 56 columns of int8
        ("quantized_int8", {"m": 8, "n": 128, "k": 256, "group": 64}, {}),  # several scales in a k-tile
        ("quantized_int8", {"m": 8, "n": 128, "k": 256, "scales": "tensor"}, {}),
        ("quantized_int8", {"m": 8, "n": 128, "k": 256, "zero_points": True}, {}),  # 16 times the differences are no bytes
        ("quantized_int8", {"m": 8, "n": 128, "k": 256, "layout": "rows"}, {}),
        ("quantized_int8", {**NVFP4, "m": 8, "n": 128, "k": 256}, {}),
        ("quantized_int8", {"m": 8, "n": 128, "k": 256, "dtype": "float8_e4m3fn"}, {}),
        ("quantized_int8", {"m": 200, "n": 128, "k": 256}, {"block_n": 112}),  # too many registers
        ("block_scaled", {"m": 64, "n": 128, "k": 256, "weights": "float8_e5m2"}, {}),  # wgmma multiplies one kind by itself here
        ("block_scaled", {"m": 64, "n": 384, "k": 256}, {"block_n": 176, "partials": 1}),  # columns of three blocks
        ("block_scaled", {"m": 64, "n": 384, "k": 256}, {"block_n": 192}),  # too many registers
        ("block_scaled", {"m": 64, "n": 384, "k": 256}, {"prefetch": 2}),  # nothing to prefetch ahead of without PDL
        ("block_scaled", {"m": 64, "n": 384, "k": 256}, {"l2_fetch": 512}),
        ("block_scaled", {"m": 128, "n": 384, "k": 512}, {"block_m": 128, "consumers": 2, "kernel_schedule": "pingpong"}),
    ],
)
def test_does_not_apply(kind: str, attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert made(kind, attrs, params) is None


def test_other_gpus_have_no_wgmma() -> None:
    arch = load_arch(ROOT, "a100-80gb")
    for kind in KINDS:
        attrs = {"m": 16, "n": 128, "k": 256}
        assert made(kind, attrs, {}, arch) is None
        space = iter_space(canonical.lower(rule_of(kind, attrs)))
        assert load_module("policies", ROOT, f"wgmma_matmul_{kind}").propose(space, arch, 8) == ()


def test_policies_leave_other_computations_alone() -> None:
    plain = iter_space(canonical.lower(load_rule(ROOT, "matmul").of(ROOT, {"m": 64, "n": 128, "k": 256, "dtype": "float16"})))
    of_kind = {kind: iter_space(canonical.lower(rule_of(kind, {"m": 64, "n": 128, "k": 256}))) for kind in KINDS}
    for kind in of_kind:
        propose = load_module("policies", ROOT, f"wgmma_matmul_{kind}").propose
        others = [plain, *(space for other, space in of_kind.items() if other != kind)]
        assert not any(propose(space, the_gpu(), 8) for space in others)


NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""What the last three bits of a code of float4_e2m1fn stand for (OCP Microscaling Formats 1.0, table 5)."""


@needs_nvcc
@pytest.mark.parametrize(("attrs", "dtype"), every(2, [MXFP4, NVFP4 | {"tensor_scale": False}], ["float16", "bfloat16"]))
def test_every_code_meets_every_scale(attrs: dict[str, Any], dtype: str) -> None:
    """Each result is one weight, rounded to the dtype of operands; NaN or infinity among weights makes all sums with it such."""
    group, m, n, k = attrs["group"], 64, 128, 256
    sizes = {"m": m, "n": n, "k": k, "dtype": dtype, "out_dtype": "float32"}
    a, codes = np.eye(m, k).astype(numpy_dtype(dtype)), np.zeros((n, k), np.uint8)
    codes[:, :m] = np.arange(m) % 16
    # Neighbouring codes of scales share a column, so that infinite weights have columns of their own.
    groups = m // group
    scales = np.zeros((k // group, n), np.uint8)
    scales[:groups] = np.arange(groups * n).reshape(n, groups).T * 256 // (groups * n)
    stored = scales if group == 32 else scales.view(numpy_dtype("float8_e4m3fn"))
    packed = load_rule(ROOT, "pack_weights")(n=n, k=k).reference(codes[:, ::2] | codes[:, 1::2] << 4)

    mod = made("quantized", attrs | sizes, {"block_n": m})
    result = Kernel(mod["main"])(a, np.asarray(packed), stored, np.full((m, n), np.nan, np.float32))[-1]

    factors = (
        scales.view(numpy_dtype("float8_e8m0fnu" if group == 32 else "float8_e4m3fn")).astype(np.float64)[:groups].repeat(group, axis=0)
    )
    values = np.where(codes > 7, -1, 1) * NUMBERS[codes & 7]
    with np.errstate(all="ignore"):
        weights = (values[:, :m].T * factors).astype(numpy_dtype(dtype)).astype(np.float32)
    finite = np.isfinite(weights).all(axis=0)
    assert finite.sum() > n // 8
    assert np.array_equal(result[:, finite], weights[:, finite])
    assert np.isnan(result[:, np.isnan(weights).any(axis=0)]).all()
    assert not np.isfinite(result[:, ~finite]).any()
