"""Grouped GEMM on mma.sync: right results on the emulated GPU whatever the sizes are, None for what it does not take."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import Kernel, host
from support.compilers import compiled_cubin, needs_nvcc
from support.grouped_cases import FLOAT8, MASKED, OFFSETS, RULE, SMALL, SMS
from support.repository import REPOSITORY
from support.thinned import only

from kerneldecl.arrays import numpy_dtype, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_matmul_grouped as policy
from kerneldecl.templates import gpu_matmul_grouped
from kerneldecl.toolchain import nvcc

A100 = load_arch(REPOSITORY, "a100-80gb")
L4 = load_arch(REPOSITORY, "l4")
"""With an instruction for float8."""
FEW_SMS, FEW_SMS_OF_L4 = (replace(arch, gpu=replace(arch.the_gpu, sm_count=SMS)) for arch in (A100, L4))
PLAIN = {"block_m": 64, "block_n": 64, "warps_m": 2, "warps_n": 2, "stages": 3, "blocks": 1}
MOE: dict[str, Any] = {"rows": 32768, "groups": 128, "n": 2048, "k": 768, "dtype": "bfloat16"}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "contiguous, rows of no group": ({"used": 170}, {}),
    "weights with n last": ({"layout": "nn", "dtype": "bfloat16"}, {"block_n": 128}),
    "masked": (MASKED, {"block_m": 128, "warps_n": 1}),
    "masked, weights with n last": (MASKED | {"layout": "nn", "out_dtype": "float32"}, {"stages": 2}),
    "sixteen rows": ({"groups": 40}, {"block_m": 16, "warps_m": 1, "stages": 4}),
    "one k-tile": ({"k": 8, "n": 18}, {"stages": 5}),
    "float8": (FLOAT8, {"block_n": 128}),
    "masked float8": (FLOAT8 | MASKED | {"rows": 80, "out_dtype": "float32"}, {"block_m": 16, "warps_m": 1, "stages": 4}),
}


def rule_of(attrs: dict[str, Any]) -> Any:
    return load_rule(REPOSITORY, RULE).of(REPOSITORY, SMALL | attrs)


@functools.cache
def plain_kernel() -> Kernel:
    return kernel_of({}, {})


def kernel_of(attrs: dict[str, Any], params: dict[str, Any]) -> Kernel:
    arch = FEW_SMS_OF_L4 if "float8" in attrs.get("dtype", "") else FEW_SMS
    mod = gpu_matmul_grouped.apply(canonical.lower(rule_of(attrs)), PLAIN | params, arch)
    assert mod is not None
    return Kernel(mod["main"])


def results(kernel: Kernel, rule: Any, inputs: list[Any], seed: int = 1) -> Any:
    (out,) = rule.signature().outputs
    *after, got = kernel(*inputs, np.full(out.shape, np.nan, numpy_dtype(out.dtype)), seed=seed)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(after, inputs, strict=True))
    return got


@needs_nvcc
@pytest.mark.parametrize("name", only(("contiguous, rows of no group", "masked float8"), CASES))
def test_right_results(name: str) -> None:
    attrs, params = CASES[name]
    rule = rule_of(attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    got = results(kernel_of(attrs, params), rule, inputs, seed=len(name))
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", OFFSETS)
def test_sizes_at_the_edges(name: str) -> None:
    rule = rule_of({})
    a, b, _ = rule.inputs(np.random.default_rng(0))
    offsets = np.array(OFFSETS[name], np.int32)
    a[offsets[-1] :] = np.nan
    assert relative_error(results(plain_kernel(), rule, [a, b, offsets]), rule.reference(a, b, offsets)) <= rule.tolerance()


@needs_nvcc
def test_offsets_that_are_none_touch_nothing_outside() -> None:
    rule = rule_of({})
    a, b, _ = rule.inputs(np.random.default_rng(0))
    results(plain_kernel(), rule, [a, b, np.array((50, 20, -7, 2**31 - 1, -(2**31)), np.int32)])


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("number", only((0,), range(0, 10, 2)))
def test_no_spills(number: int) -> None:
    mod = canonical.lower(rule_of(MOE))
    proposal = policy.propose(iter_space(mod), A100, 12)[number]
    kernel = gpu_matmul_grouped.apply(mod, dict(proposal.candidate.params), A100)
    assert kernel is not None
    cubin = compiled_cubin(host.lower(kernel["main"]).source, "sm_80", (*nvcc.FAST_MATH_FLAGS, *nvcc.TIRX_FLAGS))
    assert not any(usage.spill_bytes + usage.stack_bytes for usage in cubin.usage.values())


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"dtype": "float32"}, {}),
        ({"dtype": "float8_e4m3fn"}, {}),
        ({"k": 196}, {}),
        ({"n": 135}, {}),
        ({"n": 132, "layout": "nn"}, {}),
        ({}, {"block_m": 72}),
        ({}, {"stages": 1}),
        ({}, {"stages": 30}),
        ({}, {"blocks": 9}),
        ({}, {"warps_n": 0}),
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert gpu_matmul_grouped.apply(canonical.lower(rule_of(attrs)), PLAIN | params, FEW_SMS) is None


def test_none_on_gpus_without_mma_and_of_other_computations() -> None:
    old = replace(A100, gpu=replace(A100.the_gpu, compute_capability=(7, 5)))
    space = iter_space(canonical.lower(rule_of({})))
    assert gpu_matmul_grouped.apply(canonical.lower(rule_of({})), PLAIN, old) is None
    assert {proposal.candidate.template for proposal in policy.propose(space, old, 5)} == {"gpu_matmul_grouped_simt"}
    gemm = canonical.lower(load_rule(REPOSITORY, "matmul")(m=64, n=64, k=64, dtype="float16"))
    assert gpu_matmul_grouped.apply(gemm, PLAIN, A100) is None
    assert policy.propose(iter_space(gemm), A100, 5) == ()


@pytest.mark.parametrize("name", ["a100-80gb", "rtx-4090", "l4", "h200"])
@pytest.mark.parametrize("attrs", [MOE, MOE | {"rows": 64}, MOE | MASKED, SMALL])
def test_every_proposal_fits(name: str, attrs: dict[str, Any]) -> None:
    arch, mod = load_arch(REPOSITORY, name), canonical.lower(rule_of(attrs))
    proposals = policy.propose(iter_space(mod), arch, 100)
    assert proposals
    assert policy.propose(iter_space(mod), arch, 3) == proposals[:3]
    sizes = policy.grouped_of(iter_space(mod))
    assert all(policy.MmaGroupedParams(**dict(proposal.candidate.params)).fits(sizes, arch.the_gpu) for proposal in proposals)
