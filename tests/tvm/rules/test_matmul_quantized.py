"""Rule matmul_quantized through TVM: unscheduled and scheduled kernels match the reference, for all attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at, every
from support.unoptimised import unoptimised

from kerneldecl.arrays import aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler.canonical import lower
from kerneldecl.compiler.cpu import PIPELINE, apply_candidate
from kerneldecl.compiler.cuda import cuda_program
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.rule import Rule

ROOT = REPOSITORY
ARCH = load_arch(ROOT, "host")
NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")
MXFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
NVFP4: dict[str, Any] = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e4m3fn", "group": 16, "tensor_scale": True}


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Draw a rule without mistakes: every dtype, scale and layout, odd sizes where the layout allows them."""
    weights, dtype = draw(st.sampled_from(("int4", *NARROW))), draw(st.sampled_from(("float16", "bfloat16", *NARROW)))
    is_packed, is_wide = weights == "int4" and draw(st.booleans()), dtype not in NARROW
    groups = draw(st.sampled_from((1, 2)))
    group = draw(st.sampled_from((64, 128))) if is_packed else draw(st.sampled_from((6, 32)))
    activation_scales = "" if is_wide else draw(st.sampled_from(("", "token", "group")))
    k = group * groups if activation_scales != "group" and not is_packed else 128 * groups
    group = group if k % group == 0 else k // 2
    attrs: dict[str, Any] = {
        "m": draw(st.integers(1, 5)),
        "n": 16 * draw(st.integers(1, 3)) if is_packed else draw(st.integers(1, 9)),
        "k": k,
        "weights": weights,
        "scales": draw(st.sampled_from(("tensor", "column", "group", "block"))),
        "group": group,
        "zero_points": weights in {"int4", "int8"} and draw(st.booleans()),
        "layout": "packed" if is_packed else "rows",
        "dtype": dtype,
        "activation_scales": activation_scales,
        "epilogue": draw(st.sampled_from(((), ("bias",), ("scale_columns", "silu", "add")))),
    }
    rule = load_rule(ROOT, "matmul_quantized")(**attrs)
    assert list(rule.problems()) == []
    return rule


@st.composite
def rules_of_blocks(draw: st.DrawFn) -> Rule:
    """Draw a rule with weights in blocks of 4-bit floats: either format, every dtype of activations, odd numbers of rows and columns."""
    attrs, dtype = (
        draw(st.sampled_from((MXFP4, NVFP4, NVFP4 | {"tensor_scale": False}))),
        draw(st.sampled_from(("float16", "bfloat16", *NARROW))),
    )
    is_packed = draw(st.booleans())
    activation_scales = draw(st.sampled_from(("", "token", "group"))) if dtype in NARROW else ""
    rule = load_rule(ROOT, "matmul_quantized")(
        **attrs,
        m=draw(st.integers(1, 5)),
        n=16 * draw(st.integers(1, 3)) if is_packed else draw(st.integers(1, 9)),
        k=draw(st.integers(1, 3)) * (128 if activation_scales == "group" else 64 if is_packed else attrs["group"]),
        layout="packed" if is_packed else "rows",
        dtype=dtype,
        activation_scales=activation_scales,
        epilogue=draw(st.sampled_from(((), ("bias",), ("scale", "silu", "add")))),
    )
    assert list(rule.problems()) == []
    return rule


def error_of(rule: Rule, function: Any) -> float:
    """Compile a function, run it on the rule's inputs, and return its error relative to the reference."""
    kernel = tvm.compile(function, target=unoptimised(ARCH), tir_pipeline=PIPELINE)["main"]
    inputs = [aligned(array) for array in rule.inputs(np.random.default_rng(3))]
    [out] = [aligned(poisoned(arg)) for arg in rule.signature().outputs]
    kernel(*map(tensor, inputs), tensor(out))
    return relative_error(out, np.asarray(rule.reference(*inputs)))


@settings(max_examples=15)
@given(rules())
def test_a_kernel_matches_the_reference(rule: Rule) -> None:
    assert error_of(rule, lower(rule)) <= rule.tolerance()


@settings(max_examples=10)
@given(rules_of_blocks())
def test_a_kernel_with_blocks_matches_the_reference(rule: Rule) -> None:
    assert error_of(rule, lower(rule)) <= rule.tolerance()


@pytest.mark.parametrize("code", [0, 1, 126, 254, 255])
def test_every_power_of_two_scales(code: int) -> None:
    """The least is subnormal, the largest too large for a weight of 2 or more, and the last code is NaN."""
    rule = load_rule(ROOT, "matmul_quantized")(**MXFP4, m=1, n=2, k=32, dtype="bfloat16", out_dtype="float32")
    a, w, scales = rule.inputs(np.random.default_rng(0))
    a[:], w[:], scales[:] = 0, 0, code
    a[0, 0], w[:, 0] = 1, (1, 7)
    kernel = tvm.compile(lower(rule), target=unoptimised(ARCH), tir_pipeline=PIPELINE)["main"]
    out = aligned(poisoned(rule.signature().outputs[0]))
    kernel(*map(tensor, map(aligned, (a, w, scales))), tensor(out))
    factor = np.float64(2.0) ** (code - 127) if code < 255 else np.nan
    with np.errstate(over="ignore"):
        assert np.array_equal(out[0], np.array([0.5 * factor, 6 * factor]).astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    "attrs",
    at(
        {1, 4},
        [
            {"m": 3, "n": 7, "k": 96, **MXFP4},
            {"m": 70, "n": 33, "k": 48, **NVFP4, "dtype": "bfloat16", "epilogue": ("bias",)},
            {"m": 3, "n": 48, "k": 64, "group": 32},
            {"m": 5, "n": 33, "k": 64, "weights": "int8", "scales": "column", "zero_points": True, "epilogue": ("bias",)},
            {
                "m": 4,
                "n": 40,
                "k": 128,
                "weights": "float8_e4m3fn",
                "scales": "block",
                "dtype": "float8_e4m3fn",
                "activation_scales": "group",
            },
        ],
    ),
)
def test_cpu_gemms_dequantise_into_panels(attrs: dict[str, Any]) -> None:
    rule = load_rule(ROOT, "matmul_quantized")(**attrs)
    assert list(rule.problems()) == []
    function = lower(rule)
    proposals = load_module("policies", ROOT, "cpu_matmul").propose(iter_space(function), ARCH, 40)
    template = load_module("templates", ROOT, "cpu_matmul")
    assert proposals
    assert {each.candidate.template for each in proposals} == {"cpu_matmul"}
    for proposal in proposals[::20]:
        scheduled = template.apply(function, dict(proposal.candidate.params), ARCH)
        assert scheduled is not None
        # Weights are computed into the panels alone.
        assert "dequantised = T.sblock_alloc_buffer" not in scheduled.mod.script()
        assert error_of(rule, scheduled.mod) <= rule.tolerance()


def test_results_are_scaled_where_no_scale_varies_along_k() -> None:
    attrs = {"m": 4, "n": 8, "k": 32, "weights": "int8", "dtype": "int8", "scales": "column", "activation_scales": "token"}
    [reduction] = [block for block in iter_space(lower(load_rule(ROOT, "matmul_quantized")(**attrs))).blocks if block.is_reduction]
    assert [access.dtype for access in reduction.reads] == ["int8", "int8"]
    assert reduction.writes[0].dtype == "int32"


@needs_nvcc
@pytest.mark.parametrize(
    ("gpu", "sm", "policy", "attrs"),
    every(
        3,
        [("a100-80gb", "sm_80"), ("rtx-4090", "sm_89"), ("h200", "sm_90a")],
        [
            ("gpu_matmul_tc", {"m": 64, **MXFP4, "dtype": "bfloat16"}),
            ("gpu_matmul_tc", {"m": 64, **NVFP4, "layout": "packed"}),
            ("gpu_gemv", {"m": 1, **MXFP4}),
            ("gpu_gemv", {"m": 1, **NVFP4, "dtype": "bfloat16"}),
        ],
    ),
)
def test_blocks_compile_for_gpus_without_spills(policy: str, attrs: dict[str, Any], gpu: str, sm: str) -> None:
    arch, function = load_arch(ROOT, gpu), lower(load_rule(ROOT, "matmul_quantized").of(ROOT, {"n": 512, "k": 512, **attrs}))
    first, *_ = load_module("policies", ROOT, policy).propose(iter_space(function), arch, 1)
    scheduled = apply_candidate(ROOT, function, first.candidate, arch)
    assert scheduled is not None
    usage = compiled_cubin(cuda_program(scheduled.mod, arch, "kernel").source, sm).usage
    assert usage
    assert not any(each.spill_bytes for each in usage.values())
