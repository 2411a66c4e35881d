"""Gated GEMMs on wgmma: recognised by what they compute, right results on the emulated GPU, tilings that fit, None for others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import Kernel
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at, only
from support.wgmma_cases import GATED_GEMMS, PLAIN, SMS

from kerneldecl.arrays import numpy_dtype
from kerneldecl.compiler import canonical
from kerneldecl.compiler.gated_gemm import read_gated_gemm
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import wgmma_matmul_gated as policy
from kerneldecl.rule import Rule
from kerneldecl.templates import wgmma_matmul, wgmma_matmul_gated

H200 = load_arch(REPOSITORY, "h200")
FEW_SMS = replace(H200, gpu=replace(H200.the_gpu, sm_count=SMS))


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "matmul_gated").of(REPOSITORY, {"m": 136, "n": 72, "k": 200, "dtype": "float16", **attrs})


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh", "relu", "sigmoid"])
def test_gated_gemms_are_recognised_by_what_they_compute(gate: str) -> None:
    mod = canonical.lower(rule_of(gate=gate))
    spec = read_gated_gemm(mod)
    assert spec is not None
    assert (spec.gate, spec.m, spec.n, spec.k) == (gate, 136, 72, 200)
    assert policy.gated_of(iter_space(mod)) is not None


@needs_nvcc
@pytest.mark.parametrize("name", only(("silu",), GATED_GEMMS))
def test_computes_what_the_rule_does(name: str) -> None:
    attrs, params = GATED_GEMMS[name]
    rule = rule_of(**attrs)
    mod = wgmma_matmul_gated.apply(canonical.lower(rule), {**PLAIN, **params}, FEW_SMS)
    assert mod is not None
    kernel = Kernel(mod["main"])
    inputs = rule.inputs(np.random.default_rng(1))
    [out] = rule.signature().outputs
    result = kernel(*inputs, np.full(out.shape, np.nan, numpy_dtype(out.dtype)))[-1].astype("float64")
    expected = np.asarray(rule.reference(*inputs))
    assert np.linalg.norm(result - expected) <= rule.tolerance() * np.linalg.norm(expected)
    usage = compiled_cubin(kernel.source, "sm_90a").usage.values()
    assert not any(each.spill_bytes for each in usage)


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"n": 68}, {}),  # no whole 8 columns
        ({"k": 204}, {}),  # rows are no multiples of 16 bytes
        ({"dtype": "float32"}, {}),
        ({}, {"swap_ab": 1}),
        ({}, {"split_k": 2}),
        ({}, {"block_n": 24}),
    ],
)
def test_others_are_none(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert wgmma_matmul_gated.apply(canonical.lower(rule_of(**attrs)), {**PLAIN, **params}, H200) is None


def test_a_plain_gemm_is_not_gated_nor_the_other_way_round() -> None:
    plain = canonical.lower(
        load_rule(REPOSITORY, "matmul").of(REPOSITORY, {"m": 128, "n": 128, "k": 128, "layout": "nt", "dtype": "float16"})
    )
    assert policy.propose(iter_space(plain), H200, 5) == ()
    assert wgmma_matmul_gated.apply(plain, PLAIN, H200) is None
    assert wgmma_matmul.apply(canonical.lower(rule_of()), PLAIN, H200) is None


@pytest.mark.parametrize("m", at({1, 3}, [1, 16, 512, 4096]))
def test_every_proposal_applies(m: int) -> None:
    mod = canonical.lower(rule_of(m=m, n=1024, k=512, dtype="bfloat16"))
    found = policy.propose(iter_space(mod), H200, 12)
    assert found
    applied = [wgmma_matmul_gated.apply(mod, dict(one.candidate.params), H200) for one in found[::4]]
    assert all(applied)
    assert policy.propose(iter_space(mod), load_arch(REPOSITORY, "a100-80gb"), 5) == ()
