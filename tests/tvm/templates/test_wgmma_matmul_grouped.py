"""Grouped GEMM on wgmma: right results on the emulated GPU whatever the sizes are, its waits, None for what it does not take."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError, Kernel, host
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compilers import compiled_cubin, needs_nvcc
from support.emulated_attention import flawed
from support.grouped_cases import FLOAT8, GROUPED, MASKED, OFFSETS, PLAIN, RULE, SMALL, SMS
from support.repository import REPOSITORY
from support.thinned import at, only

from kerneldecl.arrays import numpy_dtype, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.matmul_grouped import read_matmul_grouped
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import wgmma_matmul_grouped as policy
from kerneldecl.templates import wgmma_matmul_grouped
from kerneldecl.toolchain import nvcc

H200 = load_arch(REPOSITORY, "h200")
FEW_SMS = replace(H200, gpu=replace(H200.the_gpu, sm_count=SMS))
WAIT = r"tvm_builtin_cuda_mbarrier_wait\(\(&[^;]*\b{}\[0\] \+[^;]*;"
CHOSEN = (
    "clusters, rows of no group",
    "a consumer some k-tiles behind the other",
)
MOE: dict[str, Any] = {"rows": 32768, "groups": 128, "n": 2048, "k": 768, "dtype": "bfloat16"}


def rule_of(attrs: dict[str, Any]) -> Any:
    return load_rule(REPOSITORY, RULE).of(REPOSITORY, SMALL | attrs)


def kernel_of(attrs: dict[str, Any], params: dict[str, Any]) -> Kernel:
    mod = wgmma_matmul_grouped.apply(canonical.lower(rule_of(attrs)), PLAIN | params, FEW_SMS)
    assert mod is not None
    return Kernel(mod["main"])


def results(kernel: Kernel, rule: Any, inputs: list[Any], seed: int = 1) -> Any:
    """Return what the kernel makes of the inputs, which it must leave as they are; its results are NaN before."""
    (out,) = rule.signature().outputs
    *after, got = kernel(*inputs, np.full(out.shape, np.nan, numpy_dtype(out.dtype)), seed=seed)
    assert all(one.tobytes() == other.tobytes() for one, other in zip(after, inputs, strict=True))
    return got


@needs_nvcc
@pytest.mark.parametrize("name", only(CHOSEN, GROUPED))
def test_right_results(name: str) -> None:
    attrs, params = GROUPED[name]
    rule = rule_of(attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    got = results(kernel_of(attrs, params), rule, inputs, seed=len(name))
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


@functools.cache
def plain_kernel() -> Kernel:
    return kernel_of({}, {})


@needs_nvcc
@pytest.mark.parametrize("name", at({2, 3, 4}, OFFSETS))
def test_sizes_at_the_edges(name: str) -> None:
    """Rows of no group give zero, even where they hold NaN."""
    rule = rule_of({})
    a, b, _ = rule.inputs(np.random.default_rng(0))
    offsets = np.array(OFFSETS[name], np.int32)
    a[offsets[-1] :] = np.nan
    got = results(plain_kernel(), rule, [a, b, offsets])
    assert relative_error(got, rule.reference(a, b, offsets)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize("name", only(("edges of tiles",), OFFSETS))
def test_sizes_at_the_edges_in_turns(name: str) -> None:
    """A consumer that stores a part of its two MMA tiles still waits for the buffers that it takes next."""
    attrs: dict[str, Any] = {"n": 264}
    rule = rule_of(attrs)
    a, b, _ = rule.inputs(np.random.default_rng(0))
    offsets = np.array(OFFSETS[name], np.int32)
    kernel = kernel_of(attrs, {"kernel_schedule": "pingpong", "block_n": 128, "cluster_n": 2})
    got = results(kernel, rule, [a, b, offsets], seed=len(name))
    assert relative_error(got, rule.reference(a, b, offsets)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 300), min_size=5, max_size=5))
def test_any_sizes_are_right(ends: list[int]) -> None:
    rule = rule_of({})
    a, b, _ = rule.inputs(np.random.default_rng(0))
    offsets = np.array(sorted(ends), np.int32)
    got = results(plain_kernel(), rule, [a, b, offsets], seed=sum(ends))
    assert relative_error(got, rule.reference(a, b, offsets)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize("offsets", [(300, 200, 100, 50, 0), (50, 20, -7, 2**31 - 1, -(2**31))])
def test_offsets_that_are_none_touch_nothing_outside(offsets: tuple[int, ...]) -> None:
    """The emulator fails where a kernel reads or writes outside of its arguments."""
    rule = rule_of({})
    a, b, _ = rule.inputs(np.random.default_rng(0))
    results(plain_kernel(), rule, [a, b, np.array(offsets, np.int32)])


@needs_nvcc
@pytest.mark.slow
def test_counts_that_are_none_touch_nothing_outside() -> None:
    rule = rule_of(MASKED)
    a, b, _ = rule.inputs(np.random.default_rng(0))
    counts = np.array((-5, 2**31 - 1, 101, 0, 100), np.int32)
    got = results(kernel_of(MASKED, {}), rule, [a, b, counts])
    assert relative_error(got, rule.reference(a, b, counts.clip(0, 100))) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize(
    ("pattern", "words"),
    at(
        {0},
        [
            (WAIT.format("state_stage_ptr_1"), "which an asynchronous copy still fills|which nobody has written"),
            (WAIT.format("state_stage_ptr"), "arrives at the barrier .* more often|still being read asynchronously"),
            (r"\w+fence_proxy\w+\(\);", "without fence.proxy.async"),
        ],
    ),
    ids=["loads are not waited for", "stages are not waited for", "no fence before TMA stores"],
)
def test_a_missing_wait_is_noticed(pattern: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flawed(monkeypatch, lambda source: re.sub(pattern, "", source))
    rule = rule_of({})
    with pytest.raises(EmulationError, match=words):
        results(kernel_of({}, {}), rule, rule.inputs(np.random.default_rng(0)))


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(
    ("number", "dtype"), at({4}, [*((number, "bfloat16") for number in (0, 3, 6, 9)), *((number, "float8_e4m3fn") for number in (0, 2))])
)
def test_no_spills(number: int, dtype: str) -> None:
    mod = canonical.lower(rule_of(MOE | {"dtype": dtype}))
    proposal = policy.propose(iter_space(mod), H200, 12)[number]
    kernel = wgmma_matmul_grouped.apply(mod, dict(proposal.candidate.params), H200)
    assert kernel is not None
    cubin = compiled_cubin(host.lower(kernel["main"]).source, "sm_90a", (*nvcc.FAST_MATH_FLAGS, *nvcc.TIRX_FLAGS))
    assert not any(usage.spill_bytes + usage.stack_bytes for usage in cubin.usage.values())


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"dtype": "float32"}, {}),
        ({"k": 196}, {}),
        ({"n": 132}, {}),
        ({"groups": 2000}, {}),
        ({"out_dtype": "float32"}, {}),
        ({}, {"block_m": 96}),
        ({}, {"block_n": 80}),
        ({}, {"stages": 30}),
        ({}, {"cluster_n": 4}),
        ({}, {"cluster_n": 3}),
        ({}, {"kernel_schedule": "in turns"}),
        ({"k": 100}, {"kernel_schedule": "staggered"}),
        (FLOAT8, {"kernel_schedule": "pingpong"}),
        (FLOAT8, {"block_n": 192, "block_m": 64, "consumers": 1}),
        (FLOAT8, {"block_n": 128, "block_m": 256}),
        (FLOAT8 | {"k": 330}, {}),
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert wgmma_matmul_grouped.apply(canonical.lower(rule_of(attrs)), PLAIN | params, FEW_SMS) is None


def test_none_on_other_gpus_and_of_other_computations() -> None:
    assert wgmma_matmul_grouped.apply(canonical.lower(rule_of({})), PLAIN, load_arch(REPOSITORY, "a100-80gb")) is None
    gemm = canonical.lower(load_rule(REPOSITORY, "matmul")(m=64, n=64, k=64, dtype="float16"))
    assert wgmma_matmul_grouped.apply(gemm, PLAIN, FEW_SMS) is None
    assert policy.propose(iter_space(gemm), H200, 5) == ()


@pytest.mark.parametrize(
    "attrs", [{}, MASKED, {"layout": "nn", "out_dtype": "bfloat16"}, MASKED | {"dtype": "float32"}, FLOAT8, FLOAT8 | MASKED]
)
def test_what_policies_see_is_what_templates_read(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(attrs))
    spec = read_matmul_grouped(mod)
    assert spec is not None
    assert policy.grouped_of(iter_space(mod)) == wgmma_matmul_grouped.sizes_of(spec)


@pytest.mark.parametrize(
    "attrs", at({1}, [MOE, MOE | {"dtype": "float8_e4m3fn"}, MOE | {"rows": 64}, MOE | MASKED, MOE | {"groups": 1}, SMALL])
)
def test_every_proposal_can_be_built(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(attrs))
    proposals = policy.propose(iter_space(mod), H200, 100)
    assert proposals
    assert all(wgmma_matmul_grouped.apply(mod, dict(proposal.candidate.params), H200) is not None for proposal in proposals[::4])
