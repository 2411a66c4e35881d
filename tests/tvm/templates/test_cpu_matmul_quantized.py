"""GEMMs of few rows with integer weights on CPUs: right results of every form, in bounds; nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from support.cpus import AVX2, AVX512, runnable
from support.guarded import touched_outside
from support.repository import REPOSITORY

from kerneldecl.arrays import aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE, target_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import cpu_matmul_quantized as policy
from kerneldecl.templates import cpu_matmul_quantized as template

ARCH = runnable(AVX2)
SMALL: dict[str, Any] = {"m": 5, "n": 37, "k": 256}
PARAMS = {"rows": 2, "tile_m": 3}
MXFP4 = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4 = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16, "tensor_scale": True}
BLOCKS = {"n": 256, "weights": "int8", "scales": "block", "dtype": "int8", "activation_scales": "group"}


def rule_of(attrs: dict[str, Any]) -> Any:
    rule = load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, SMALL | attrs)
    assert list(rule.problems()) == []
    return rule


def built(rule: Any, params: dict[str, Any], arch: Any = ARCH) -> Any:
    mod = template.apply(canonical.lower(rule), params, arch)
    assert mod is not None
    return tvm.compile(mod, target=target_of(arch), tir_pipeline=PIPELINE)["main"]


@pytest.mark.parametrize(
    "attrs",
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
