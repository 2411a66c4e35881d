"""GEMMs of few rows with integer weights on CPUs: right results of every form, in bounds; nothing else is taken for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from support.cpus import AVX2, AVX512, runnable
from support.guarded import touched_outside
from support.repository import REPOSITORY
from support.thinned import at
from support.unoptimised import unoptimised

from kerneldecl.analysis.cpu_features import has_bfloat16_dots
from kerneldecl.arrays import aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.hardware.host import detect
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import cpu_matmul_quantized as policy
from kerneldecl.templates import cpu_matmul_quantized as template
from kerneldecl.templates import cpu_matmul_quantized_bf16 as bf16_template

ARCH = runnable(AVX2)
ZNVER4 = replace(runnable(AVX512), tvm_target=(("kind", "llvm"), ("mcpu", "znver4"), ("num-cores", 2)))
needs_bfloat16_dots = pytest.mark.skipif(not has_bfloat16_dots(detect()), reason="this CPU has no vdpbf16ps")
SMALL: dict[str, Any] = {"m": 5, "n": 37, "k": 256}
PARAMS = {"rows": 2, "tile_m": 3}
MXFP4 = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4 = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16, "tensor_scale": True}
BLOCKS = {"n": 256, "weights": "int8", "scales": "block", "dtype": "int8", "activation_scales": "group"}


def rule_of(attrs: dict[str, Any]) -> Any:
    rule = load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, SMALL | attrs)
    assert list(rule.problems()) == []
    return rule


def built(rule: Any, params: dict[str, Any], arch: Any = ARCH, of: Any = template) -> Any:
    mod = of.apply(canonical.lower(rule), params, arch)
    assert mod is not None
    return tvm.compile(mod, target=unoptimised(arch), tir_pipeline=PIPELINE)["main"]


@pytest.mark.parametrize(
    "attrs",
    at(
        {1, 5, 8},
        [
            {"m": 1, "dtype": "bfloat16"},
            {"zero_points": True, "epilogue": ("bias", "relu")},
            {"group": 32, "epilogue": ("add",)},
            {"m": 1, "n": 1, "scales": "column"},
            {"weights": "int8", "scales": "tensor"},
            {"weights": "int8", "scales": "group", "zero_points": True, "dtype": "bfloat16", "m": 17},
            BLOCKS,
            MXFP4,
            MXFP4 | {"m": 1, "n": 1, "k": 32, "dtype": "bfloat16", "epilogue": ("bias", "relu")},
            NVFP4,
            NVFP4 | {"m": 1, "k": 48, "dtype": "bfloat16", "tensor_scale": False},
            MXFP4 | {"dtype": "int8", "activation_scales": "token"},
        ],
    ),
    ids=lambda attrs: ",".join(f"{name}={value}" for name, value in attrs.items()),
)
def test_proposals_compute_the_reference(attrs: dict[str, Any]) -> None:
    rule = rule_of(attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    proposals = policy.propose(iter_space(canonical.lower(rule)), ARCH, 1000)
    for each in {proposals[0], proposals[-1]}:
        out = aligned(poisoned(rule.signature().outputs[0]))
        built(rule, dict(each.candidate.params))(*(tensor(aligned(array)) for array in inputs), tensor(out))
        assert relative_error(out, rule.reference(*inputs)) <= rule.tolerance(), each


def test_groups_of_half_a_vector_have_vectors_of_half_the_lanes() -> None:
    """A vector of 16 bytes has 32 weights of 4 bits, but a group of NVFP4 16."""
    rule = rule_of(NVFP4 | {"m": 3, "k": 80})
    inputs, out = rule.inputs(np.random.default_rng(0)), aligned(poisoned(rule.signature().outputs[0]))
    built(rule, PARAMS, runnable(AVX512))(*(tensor(aligned(array)) for array in inputs), tensor(out))
    assert relative_error(out, rule.reference(*inputs)) <= rule.tolerance()


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("attrs", [{"zero_points": True, "epilogue": ("bias",)}, {"weights": "int8", "scales": "column"}, NVFP4])
def test_nothing_outside_of_the_arguments_is_touched(attrs: dict[str, Any], at_end: bool) -> None:
    """Arguments lie beside pages that must not be read."""
    rule = rule_of(attrs)
    assert touched_outside(rule, built(rule, PARAMS), at_end=at_end) == ""


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("matmul", {"m": 4, "n": 32, "k": 64, "layout": "nt"}),
        ("matmul_quantized", {"m": 4, "n": 64, "k": 128, "layout": "packed"}),
        ("matmul_quantized", {"m": 4, "n": 64, "k": 128, "weights": "int8", "scales": "column", "dtype": "int8"}),
        ("matmul_quantized", {"m": 4, "n": 64, "k": 128, "weights": "float8_e4m3fn", "scales": "column"}),
    ],
)
def test_other_computations_are_none(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))
    assert template.apply(mod, PARAMS, ARCH) is None
    assert policy.propose(iter_space(mod), ARCH, 5) == ()


def test_groups_of_no_whole_vectors_and_many_rows_are_left_to_others() -> None:
    assert template.apply(canonical.lower(rule_of({"group": 4})), PARAMS, ARCH) is None
    assert policy.propose(iter_space(canonical.lower(rule_of({"m": 128}))), ARCH, 5) == ()


@pytest.mark.parametrize("params", [{"rows": 0}, {"rows": 9}, {"tile_m": 0}, {"tile_m": 17}])
def test_none_where_parameters_do_not_fit(params: dict[str, Any]) -> None:
    assert template.apply(canonical.lower(rule_of({})), PARAMS | params, ARCH) is None


IN_BF16 = {"m": 5, "n": 37, "k": 256, "dtype": "bfloat16"}


@needs_bfloat16_dots
@pytest.mark.parametrize(
    "attrs",
    at(
        {2, 4, 5, 7},
        [
            {"m": 1},
            {"m": 1, "n": 1, "scales": "column"},
            {"m": 16, "zero_points": True, "epilogue": ("bias", "relu"), "out_dtype": "float32"},
            {"scales": "tensor", "epilogue": ("add",)},
            {"n": 64, "scales": "block", "group": 64},
            MXFP4 | {"epilogue": ("bias",)},
            {"m": 9, "weights": "int8", "zero_points": True},
            {"m": 1, "weights": "int8", "scales": "column"},
        ],
    ),
    ids=lambda attrs: ",".join(f"{name}={value}" for name, value in attrs.items()),
)
def test_products_in_bfloat16_compute_the_reference(attrs: dict[str, Any]) -> None:
    rule = rule_of(IN_BF16 | attrs)
    inputs, (out,) = rule.inputs(np.random.default_rng(0)), rule.signature().outputs
    proposals = [
        each.candidate
        for each in policy.propose(iter_space(canonical.lower(rule)), ZNVER4, 1000)
        if each.candidate.template == "cpu_matmul_quantized_bf16"
    ]
    for each in (proposals[0], proposals[-1]):
        got = aligned(poisoned(out))
        built(rule, dict(each.params), ZNVER4, bf16_template)(*(tensor(aligned(array)) for array in inputs), tensor(got))
        # What is multiplied is what the rule says: only the order of the sums differs.
        assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance() / 2, each


@needs_bfloat16_dots
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("weights", ["int4", "int8"])
def test_products_in_bfloat16_touch_nothing_outside_of_the_arguments(weights: str, at_end: bool) -> None:
    rule = rule_of(IN_BF16 | {"weights": weights, "zero_points": True})
    assert touched_outside(rule, built(rule, PARAMS, ZNVER4, bf16_template), at_end=at_end) == ""


@pytest.mark.parametrize(
    ("attrs", "arch"),
    [
        ({}, runnable(AVX512)),
        ({"dtype": "float16"}, ZNVER4),
        ({"dtype": "int8", "activation_scales": "token"}, ZNVER4),
        ({"group": 16}, ZNVER4),
        (NVFP4, ZNVER4),
    ],
)
def test_what_is_not_multiplied_in_bfloat16(attrs: dict[str, Any], arch: Any) -> None:
    mod = canonical.lower(rule_of(IN_BF16 | attrs))
    assert bf16_template.apply(mod, PARAMS, arch) is None
    assert {each.candidate.template for each in policy.propose(iter_space(mod), arch, 1000)} <= {"cpu_matmul_quantized"}


def test_products_in_bfloat16_come_first() -> None:
    first, *_ = policy.propose(iter_space(canonical.lower(rule_of({"m": 16, "n": 4096, "k": 4096, "dtype": "bfloat16"}))), ZNVER4, 1)
    assert first.candidate.template == "cpu_matmul_quantized_bf16"
