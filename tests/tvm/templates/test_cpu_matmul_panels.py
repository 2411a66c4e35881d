"""GEMMs by panels on CPUs: right results of any sizes, layouts and forms, in bounds; nothing else is taken for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpus import AVX2, AVX512, SSE, runnable
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
from kerneldecl.policies import cpu_matmul_panels as policy
from kerneldecl.policies.cpu.panel_gemm import choices
from kerneldecl.templates import cpu_matmul_panels as template

ZNVER4 = replace(runnable(AVX512), tvm_target=(("kind", "llvm"), ("mcpu", "znver4"), ("num-cores", 2)))
ARCHS = {"SSE": runnable(SSE), "AVX2": runnable(AVX2), "pairs": ZNVER4}
NO_PAIRS = pytest.mark.skipif(not has_bfloat16_dots(detect()), reason="this CPU has no vdpbf16ps")
FORMS = ("SSE", "AVX2", pytest.param("pairs", marks=NO_PAIRS))
PARAMS = {"tile_m": 4, "vectors": 2, "block_k": 32, "block_m": 8}
SMALL: dict[str, Any] = {"m": 13, "n": 45, "k": 77, "layout": "nt"}


def rule_of(attrs: dict[str, Any], name: str = "matmul") -> Any:
    rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    assert list(rule.problems()) == []
    return rule


def built(rule: Any, params: dict[str, Any], arch: Any) -> Any:
    mod = template.apply(canonical.lower(rule), params, arch)
    assert mod is not None
    return tvm.compile(mod, target=unoptimised(arch), tir_pipeline=PIPELINE)["main"]


def error_of(rule: Any, params: dict[str, Any], arch: Any) -> float:
    inputs, out = rule.inputs(np.random.default_rng(0)), aligned(poisoned(rule.signature().outputs[0]))
    built(rule, params, arch)(*(tensor(aligned(array)) for array in inputs), tensor(out))
    return float(relative_error(out, rule.reference(*inputs)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "attrs",
    at(
        {1, 4},
        [
            {"layout": "nn"},
            {"layout": "tn", "epilogue": ("bias", "gelu")},
            {"layout": "tt", "epilogue": ("add",)},
            {"out_dtype": "float32"},
            {"batch": 3, "m": 5},
            {"batch": 2, "heads": 3, "layout": "nn"},
            {"m": 2, "n": 16, "k": 1},
            {"n": 5, "k": 3},
        ],
    ),
    ids=lambda attrs: ",".join(f"{name}={value}" for name, value in attrs.items()),
)
def test_forms_compute_the_reference(attrs: dict[str, Any], form: str) -> None:
    rule = rule_of(SMALL | {"dtype": "bfloat16" if form == "pairs" else "float32"} | attrs)
    assert error_of(rule, PARAMS, ARCHS[form]) <= rule.tolerance()


@pytest.mark.parametrize("dtype", at({0}, ["float16", "bfloat16"]))
def test_narrow_operands_are_multiplied_in_float32(dtype: str) -> None:
    rule = rule_of(SMALL | {"dtype": dtype})
    assert error_of(rule, PARAMS, ARCHS["AVX2"]) <= rule.tolerance()


@pytest.mark.parametrize("form", FORMS)
def test_gated_gemms_have_all_sums_before_they_are_gated(form: str) -> None:
    rule = rule_of({"m": 7, "n": 37, "k": 40, "dtype": "bfloat16" if form == "pairs" else "float32"}, "matmul_gated")
    assert error_of(rule, PARAMS, ARCHS[form]) <= rule.tolerance()


@NO_PAIRS
@pytest.mark.parametrize(
    "attrs",
    at(
        {1},
        [
            {"group": 32},
            {"group": 64, "zero_points": True, "epilogue": ("bias", "relu"), "out_dtype": "float32"},
            {"weights": "int8", "scales": "column"},
            {"weights": "int8", "group": 64, "zero_points": True},
            {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32},
        ],
    ),
    ids=lambda attrs: ",".join(f"{name}={value}" for name, value in attrs.items()),
)
def test_weights_are_dequantised_into_panels(attrs: dict[str, Any]) -> None:
    rule = rule_of({"m": 70, "n": 53, "k": 192, "dtype": "bfloat16"} | attrs, "matmul_quantized")
    for block_k in (32, 1024):
        assert error_of(rule, PARAMS | {"block_k": block_k}, ZNVER4) <= rule.tolerance() / 2


@settings(max_examples=12, deadline=None)
@given(
    m=st.integers(1, 40),
    n=st.integers(2, 70),
    k=st.integers(1, 100),
    layout=st.sampled_from(("nn", "nt", "tn", "tt")),
    tile_m=st.integers(1, 14),
    vectors=st.integers(1, 3),
    block_k=st.integers(1, 120),
    block_m=st.integers(1, 40),
    pairs=st.booleans(),
)
def test_any_sizes_and_parameters_compute_the_reference(m: int, n: int, k: int, layout: str, pairs: bool, **params: int) -> None:
    is_paired = pairs and has_bfloat16_dots(detect())
    rule = rule_of({"m": m, "n": n, "k": k, "layout": layout, "dtype": "bfloat16" if is_paired else "float32"})
    assert error_of(rule, params, ARCHS["pairs" if is_paired else "SSE"]) <= rule.tolerance()


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", at({1}, ["nn", "tt"]))
def test_nothing_outside_of_the_arguments_is_touched(layout: str, form: str, at_end: bool) -> None:
    """Arguments lie beside pages that must not be read."""
    rule = rule_of(SMALL | {"layout": layout, "dtype": "bfloat16" if form == "pairs" else "float32", "epilogue": ("bias",)})
    assert touched_outside(rule, built(rule, PARAMS, ARCHS[form]), at_end=at_end) == ""


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("matmul", {"m": 8, "n": 32, "k": 64, "dtype": "float64"}),
        ("matmul", {"m": 8, "n": 32, "k": 64, "dtype": "int8"}),
        ("matmul_quantized", {"m": 8, "n": 64, "k": 128}),
        ("matmul_quantized", {"m": 8, "n": 64, "k": 128, "layout": "packed"}),
        ("conv2d", {"n": 1, "h": 8, "w": 8, "c": 8, "f": 8, "kh": 1, "kw": 1}),
    ],
)
def test_other_computations_are_none(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(attrs, name))
    assert template.apply(mod, PARAMS, ARCHS["AVX2"]) is None
    assert policy.propose(iter_space(mod), ARCHS["AVX2"], 5) == ()


@pytest.mark.parametrize("params", [{"tile_m": 0}, {"tile_m": 17}, {"vectors": 5}, {"block_k": 0}, {"block_m": 0}])
def test_none_where_parameters_do_not_fit(params: dict[str, Any]) -> None:
    assert template.apply(canonical.lower(rule_of(SMALL)), PARAMS | params, ARCHS["AVX2"]) is None


def test_every_choice_fits() -> None:
    for arch in ARCHS.values():
        gemm = policy.panel_gemm_of(iter_space(canonical.lower(rule_of(SMALL | {"dtype": "bfloat16"}))), arch)
        assert gemm is not None
        assert all(params.fits() for params in choices(gemm, arch.the_cpu))


def test_pairs_are_raced_alone_and_float32_beside_tiles_of_whole_matrices() -> None:
    def templates(attrs: dict[str, Any], arch: Any) -> set[str]:
        proposals = policy.propose(iter_space(canonical.lower(rule_of(attrs))), arch, 6)
        return {each.candidate.template for each in proposals}

    assert templates(SMALL | {"dtype": "bfloat16"}, ZNVER4) == {"cpu_matmul_panels"}
    assert templates({"m": 500, "n": 333, "k": 500, "layout": "nt"}, ARCHS["AVX2"]) == {"cpu_matmul_panels", "cpu_matmul"}
    assert templates(SMALL | {"m": 1}, ARCHS["AVX2"]) == set()
    assert templates({"m": 64, "n": 64, "k": 64, "layout": "nt"}, ARCHS["AVX2"]) == set(), "a small one of whole vectors keeps its trace"
