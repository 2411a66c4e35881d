"""Grouped GEMM on CUDA cores: right results on the emulated GPU whatever the sizes are, proposals that fit, None for other functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import Kernel
from support.compilers import compiled_cubin, needs_nvcc
from support.grouped_cases import FLOAT8, MASKED, OFFSETS, RULE, SMALL, SMS
from support.repository import REPOSITORY
from support.thinned import only

from kerneldecl.arrays import numpy_dtype, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_matmul_grouped as policy
from kerneldecl.templates import gpu_matmul_grouped_simt as template

T4 = load_arch(REPOSITORY, "t4")
FEW_SMS = replace(T4, gpu=replace(T4.the_gpu, sm_count=SMS))
PLAIN = {"block_m": 64, "block_n": 64, "thread_m": 8, "thread_n": 8, "blocks": 1}
FLOAT32 = {"dtype": "float32"}
MOE: dict[str, Any] = {"rows": 32768, "groups": 128, "n": 2048, "k": 768}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "rows of no group": (FLOAT32 | {"used": 170}, {}),
    "odd sizes": (FLOAT32 | {"k": 203, "n": 135}, {"block_m": 32, "thread_m": 4}),
    "odd sizes, n last": (FLOAT32 | {"k": 203, "n": 135, "layout": "nn"}, {"block_n": 128}),
    "masked bfloat16": (MASKED | {"dtype": "bfloat16"}, {"block_m": 16, "thread_m": 4, "thread_n": 4}),
    "masked, n last, results of another dtype": (MASKED | {"layout": "nn", "out_dtype": "float32"}, {"thread_n": 4}),
    "one k-tile": ({"k": 7, "n": 18}, {}),
    "more groups than rows": (FLOAT32 | {"groups": 70, "rows": 40}, {"block_m": 16, "thread_m": 4, "thread_n": 4}),
}


def rule_of(attrs: dict[str, Any]) -> Any:
    return load_rule(REPOSITORY, RULE).of(REPOSITORY, SMALL | attrs)


def results(rule: Any, params: dict[str, Any], inputs: list[Any]) -> Any:
    mod = template.apply(canonical.lower(rule), PLAIN | params, FEW_SMS)
    assert mod is not None
    (out,) = rule.signature().outputs
    *after, got = Kernel(mod["main"])(*inputs, np.full(out.shape, np.nan, numpy_dtype(out.dtype)))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(after, inputs, strict=True))
    return got


@needs_nvcc
@pytest.mark.parametrize("name", only(("rows of no group", "odd sizes, n last", "masked bfloat16"), CASES))
def test_right_results(name: str) -> None:
    attrs, params = CASES[name]
    rule = rule_of(attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    assert relative_error(results(rule, params, inputs), rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("name", OFFSETS)
def test_sizes_at_the_edges(name: str) -> None:
    rule = rule_of(FLOAT32)
    a, b, _ = rule.inputs(np.random.default_rng(0))
    offsets = np.array(OFFSETS[name], np.int32)
    a[offsets[-1] :] = np.nan
    assert relative_error(results(rule, {}, [a, b, offsets]), rule.reference(a, b, offsets)) <= rule.tolerance()


@needs_nvcc
def test_offsets_that_are_none_touch_nothing_outside() -> None:
    rule = rule_of(FLOAT32)
    a, b, _ = rule.inputs(np.random.default_rng(0))
    results(rule, {}, [a, b, np.array((50, 20, -7, 2**31 - 1, -(2**31)), np.int32)])


@needs_nvcc
@pytest.mark.parametrize("attrs", [FLOAT32, {"dtype": "bfloat16"}], ids=str)
def test_the_first_choice_does_not_spill(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(MOE | attrs))
    first = policy.propose(iter_space(mod), T4, 1)[0].candidate
    kernel = template.apply(mod, dict(first.params), T4)
    assert kernel is not None
    (usage,) = compiled_cubin(cuda_source(kernel, T4, "kernel"), "sm_75").usage.values()
    assert usage.spill_bytes + usage.stack_bytes == 0


@pytest.mark.parametrize("name", ["t4", "rtx-2080-ti", "a100-80gb", "h200"])
@pytest.mark.parametrize("attrs", [MOE, MOE | {"rows": 64}, MOE | MASKED, {"k": 203, "n": 135, "layout": "nn"}], ids=str)
def test_every_proposal_fits(name: str, attrs: dict[str, Any]) -> None:
    arch, mod = load_arch(REPOSITORY, name), canonical.lower(rule_of(FLOAT32 | attrs))
    proposals = policy.propose(iter_space(mod), arch, 100)
    assert {proposal.candidate.template for proposal in proposals} == {"gpu_matmul_grouped_simt"}
    assert all(template.apply(mod, dict(proposal.candidate.params), arch) is not None for proposal in proposals[::5])


def test_tensor_cores_take_what_they_can() -> None:
    a100 = load_arch(REPOSITORY, "a100-80gb")
    whole, odd = ({"dtype": "float16"} | sizes for sizes in ({}, {"n": 135}))
    for attrs, name in ((whole, "gpu_matmul_grouped"), (odd, "gpu_matmul_grouped_simt")):
        space = iter_space(canonical.lower(rule_of(attrs)))
        assert {proposal.candidate.template for proposal in policy.propose(space, a100, 100)} == {name}


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        (FLOAT8, {}),
        ({}, {"block_m": 60}),
        ({}, {"thread_m": 6}),
        ({}, {"thread_n": 32, "block_n": 96}),
        ({}, {"blocks": 0}),
        ({}, {"blocks": 40}),
        ({}, {"block_m": 512, "block_n": 512}),
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert template.apply(canonical.lower(rule_of(attrs)), PLAIN | params, FEW_SMS) is None
