"""Group norms: recognised by what they compute, right results on the CPU and on the emulated GPU, None for what is no group norm."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from emulation import emulate
from support.compilers import needs_nvcc
from support.cpus import SSE, runnable
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.analysis.group_norm import group_norm_of
from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.group_norm import read_group_norm
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.passes import vector_math
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import cpu_group_norm as cpu_policy
from kerneldecl.policies import gpu_group_norm as gpu_policy
from kerneldecl.rule import Rule
from kerneldecl.templates import cpu_group_norm, gpu_group_norm

H200, HOST = load_arch(REPOSITORY, "h200"), runnable(SSE)
UNET = {"shape": (2, 64, 64, 320), "groups": 32, "axis": -1, "dtype": "float16", "activation": "silu"}
SHAPES: list[dict[str, Any]] = [
    {"shape": (2, 4, 5, 48), "groups": 8, "axis": -1, "dtype": "float16", "activation": "silu"},
    {"shape": (1, 24, 4, 5), "groups": 4, "dtype": "bfloat16", "activation": "gelu"},
    {"shape": (2, 3, 7, 5, 6), "groups": 6, "axis": -1, "activation": "relu"},
    {"shape": (2, 6, 35), "groups": 3},
    {"shape": (3, 8), "groups": 4, "dtype": "float16"},
    {"shape": (2, 5, 5), "groups": 1},
    {"shape": (1, 1, 9), "groups": 1, "activation": "silu"},
]


def rule_of(attrs: dict[str, Any]) -> Rule:
    return load_rule(REPOSITORY, "group_norm").of(REPOSITORY, attrs)


def name_of(value: Any) -> str:
    return "x".join(map(str, value["shape"])) if isinstance(value, dict) and "shape" in value else str(value).replace(" ", "")


def on_cpu(rule: Rule, params: Any, inputs: list[Any]) -> Any:
    vector_math.register()
    kernel = cpu_group_norm.apply(canonical.lower(rule), dict(params), HOST)
    assert kernel is not None
    (out,) = rule.signature().outputs
    tensors = [tvm.runtime.tensor(array) for array in (*inputs, np.full(out.shape, np.nan, inputs[0].dtype))]
    tvm.compile(kernel, target="llvm")["main"](*tensors)
    return tensors[-1].numpy()


def on_gpu(rule: Rule, params: Any, inputs: list[Any]) -> Any:
    kernel = gpu_group_norm.apply(canonical.lower(rule), dict(params), H200)
    assert kernel is not None
    (out,) = rule.signature().outputs
    *after, got = emulate(kernel["main"], *inputs, np.full(out.shape, np.nan, inputs[0].dtype))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(after, inputs, strict=True))
    return got


def params_of(policy: Any, rule: Rule, arch: Any, top_k: int = 40) -> Iterator[dict[str, Any]]:
    for proposal in policy.propose(iter_space(canonical.lower(rule)), arch, top_k):
        yield dict(proposal.candidate.params)


@pytest.mark.parametrize("attrs", [UNET, *SHAPES], ids=name_of)
def test_a_norm_is_recognised_by_what_it_computes(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(attrs))
    spec = read_group_norm(mod)
    assert spec is not None
    assert (spec.shape, spec.groups, spec.activation) == (attrs["shape"], attrs["groups"], attrs.get("activation", ""))
    assert group_norm_of(iter_space(mod)) == spec.sizes


def test_what_is_no_group_norm_is_none_and_has_no_proposal() -> None:
    def lowered(name: str, **attrs: Any) -> Any:
        return canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))

    params = {"width": 1, "columns": 32, "rows": 1, "chunks": 1, "unroll": 1}
    others = [lowered("layer_norm", shape=(4, 8)), lowered("softmax", shape=(4, 8)), lowered("elementwise", op="add", shape=(4, 8))]
    for mod in (*others, lowered("group_norm", shape=(2, 4, 6), groups=2, dtype="float64")):
        assert gpu_policy.propose(iter_space(mod), H200, 5) == cpu_policy.propose(iter_space(mod), HOST, 5) == ()
        assert gpu_group_norm.apply(mod, params, H200) is cpu_group_norm.apply(mod, CPU, HOST) is None


CPU = {"vectors": 2, "block": 4, "parallel": True}


@pytest.mark.parametrize("attrs", at({0, 1, 5}, SHAPES), ids=name_of)
def test_right_results_on_the_cpu(attrs: dict[str, Any]) -> None:
    rule = rule_of(attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    for params in (CPU, CPU | {"vectors": 1, "block": 100, "parallel": False}):
        assert relative_error(on_cpu(rule, params, inputs), rule.reference(*inputs)) <= rule.tolerance()


GPU: list[tuple[dict[str, Any], dict[str, int]]] = [
    (SHAPES[0], {"width": 8, "columns": 6, "rows": 3, "chunks": 3, "unroll": 2}),  # whole groups of all channels, idle threads
    (SHAPES[0], {"width": 4, "columns": 3, "rows": 5, "chunks": 1, "unroll": 4}),  # slices of channels, all of a thread in registers
    (SHAPES[1], {"width": 4, "columns": 7, "rows": 1, "chunks": 2, "unroll": 2}),
    (SHAPES[3], {"width": 1, "columns": 40, "rows": 1, "chunks": 1, "unroll": 1}),  # what registers do not hold is read again
    (SHAPES[5], {"width": 1, "columns": 5, "rows": 1, "chunks": 2, "unroll": 2}),
]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("attrs", "params"), GPU, ids=name_of)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, int]) -> None:
    rule = rule_of(attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    assert relative_error(on_gpu(rule, params, inputs), rule.reference(*inputs)) <= rule.tolerance()


def test_a_mean_far_from_zero_costs_no_precision() -> None:
    """The difference of sums of squares would have no correct digit: they are 10^10 times the variance."""
    rule = rule_of({"shape": (1, 7, 9, 8), "groups": 2, "axis": -1})
    x, gamma, beta = rule.inputs(np.random.default_rng(0))
    inputs = [(x * np.float32(0.5)).round(2) + np.float32(2.0**16), gamma, beta]
    want = rule.reference(*inputs)
    assert relative_error(on_cpu(rule, CPU, inputs), want) <= rule.tolerance()


@needs_nvcc
@pytest.mark.slow
def test_a_mean_far_from_zero_costs_no_precision_on_a_gpu() -> None:
    rule = rule_of({"shape": (1, 8, 36), "groups": 2})
    x, gamma, beta = rule.inputs(np.random.default_rng(0))
    inputs = [(x * np.float32(0.5)).round(2) + np.float32(2.0**16), gamma, beta]
    for chunks in (1, 2):
        params = {"width": 4, "columns": 18, "rows": 1, "chunks": chunks, "unroll": 2}
        assert relative_error(on_gpu(rule, params, inputs), rule.reference(*inputs)) <= rule.tolerance()


@pytest.mark.parametrize("attrs", at({0, 2}, [UNET, UNET | {"shape": (2, 320, 64, 64), "axis": 1}, *SHAPES]), ids=name_of)
def test_all_proposals_fit(attrs: dict[str, Any]) -> None:
    rule = rule_of(attrs)
    mod = canonical.lower(rule)
    gpu, cpu = list(params_of(gpu_policy, rule, H200)), list(params_of(cpu_policy, rule, HOST))
    assert gpu
    assert cpu
    assert all(gpu_group_norm.apply(mod, params, H200) is not None for params in gpu[:: max(1, len(gpu) // 3)])
    assert all(cpu_group_norm.apply(mod, params, HOST) is not None for params in cpu[::3])


def test_many_pixels_of_few_groups_are_shared_by_thread_blocks() -> None:
    """64 groups of 40960 elements do not fill a GPU with one thread block each; 4096 groups do."""
    first, *_ = params_of(gpu_policy, rule_of(UNET), H200)
    assert first["chunks"] > 1
    whole, *_ = params_of(gpu_policy, rule_of({"shape": (16, 256, 16, 16), "groups": 256, "dtype": "float16"}), H200)
    assert whole["chunks"] == 1


def test_parameters_that_do_not_fit_are_none() -> None:
    mod = canonical.lower(rule_of(UNET))
    fitting = {"width": 8, "columns": 40, "rows": 8, "chunks": 64, "unroll": 4}
    assert gpu_group_norm.apply(mod, fitting, H200) is not None
    for wrong in ({"width": 3}, {"columns": 24}, {"rows": 64}, {"chunks": 0}, {"chunks": 5000}):
        assert gpu_group_norm.apply(mod, fitting | wrong, H200) is None
    small = replace(H200, gpu=replace(H200.the_gpu, smem_per_block_bytes=1024))
    assert gpu_group_norm.apply(mod, fitting, small) is None
