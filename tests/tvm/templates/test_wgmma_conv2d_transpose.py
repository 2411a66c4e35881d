"""Transposed convolutions on wgmma: right results of every kind on the emulated GPU, no spills, and None for what they do not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from emulation import host
from support.compilers import compiled_cubin, needs_nvcc
from support.emulated_kernel import error
from support.thinned import at
from support.wgmma_cases import CONV_PARAMS, TRANSPOSED, UPSAMPLING

import kerneldecl
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_matmul
from kerneldecl.policies import wgmma_conv2d_transpose as policy
from kerneldecl.templates import wgmma_conv2d_transpose
from kerneldecl.toolchain import nvcc

ROOT = Path(kerneldecl.__file__).parent.parent
H200 = load_arch(ROOT, "h200")
DECODER = {"n": 16, "h": 32, "w": 32, "c": 256, "f": 128}


def rule_of(attrs: dict[str, Any]) -> Any:
    return load_rule(ROOT, "conv2d_transpose").of(ROOT, attrs)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({7}, TRANSPOSED))
def test_right_results(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert error(wgmma_conv2d_transpose, rule_of(attrs), CONV_PARAMS | params, H200) <= 1


@pytest.mark.slow
@needs_nvcc
def test_first_choices_registers_suffice() -> None:
    mod = canonical.lower(rule_of(UPSAMPLING | DECODER))
    first, *_ = policy.propose(iter_space(mod), H200, 1)
    kernel = wgmma_conv2d_transpose.apply(mod, dict(first.candidate.params), H200)
    assert kernel is not None
    source = host.lower(kernel["main"]).source
    assert "wgmma.mma_async.sync.aligned.m64n" in source
    [usage] = compiled_cubin(source, "sm_90a", nvcc.FAST_MATH_FLAGS).usage.values()
    assert usage.spill_bytes == 0


@pytest.mark.parametrize(
    "attrs",
    [
        {"c": 12},
        {"f": 36},
        {"dtype": "float32"},
        {"layout": "nchw"},
        {"kh": 3, "kw": 3},
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(UPSAMPLING | attrs))
    assert wgmma_conv2d_transpose.apply(mod, CONV_PARAMS, H200) is None
    assert policy.why_not(iter_space(mod), H200)
    assert not policy.propose(iter_space(mod), H200, 1)


def test_other_computations_are_left_to_others() -> None:
    gemm = load_rule(ROOT, "matmul").of(ROOT, {"m": 256, "n": 256, "k": 256, "dtype": "float16"})
    mod = canonical.lower(gemm)
    assert wgmma_conv2d_transpose.apply(mod, CONV_PARAMS, H200) is None
    assert policy.why_not(iter_space(mod), H200) == "it is not a transposed convolution"


@pytest.mark.parametrize(
    "attrs",
    at(
        {2},
        [
            DECODER,
            {"n": 8, "h": 64, "w": 64, "c": 128, "f": 64, "kh": 2, "kw": 2, "padding": 0},
            {"n": 1, "h": 8, "w": 8, "c": 512, "f": 512, "epilogue": ("bias", "add")},
            {"n": 3, "h": 9, "w": 20, "c": 24, "f": 200, "kh": 3, "kw": 3, "extra": 1},
        ],
    ),
)
def test_the_policys_proposals_apply(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(UPSAMPLING | attrs))
    proposals = policy.propose(iter_space(mod), H200, 8)
    assert proposals
    for proposal in proposals:
        assert wgmma_conv2d_transpose.apply(mod, dict(proposal.candidate.params), H200) is not None, proposal.candidate


def test_tensor_cores_by_wgmma_come_first() -> None:
    space = iter_space(canonical.lower(rule_of(UPSAMPLING | DECODER)))
    first, *_ = gpu_matmul.propose(space, H200, 8)
    assert first.candidate.template == "wgmma_conv2d_transpose"
