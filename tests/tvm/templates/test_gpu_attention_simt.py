"""Attention on CUDA cores: right results of every kind on the emulated GPU, code without spills, and None for what it does not take."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError
from support import emulated_attention
from support.attention_cases import SMALL
from support.attention_simt_cases import ATTENTIONS, FLOAT32, PLAIN
from support.compilers import compiled_cubin, needs_nvcc
from support.emulated_attention import error, flawed, growing_scores, rule_of
from support.repository import REPOSITORY
from support.thinned import only

from kerneldecl.arrays import finite_rms, relative_error, row_scales
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import gpu_attention_simt as policy
from kerneldecl.runners.reference_data import make_reference_data
from kerneldecl.templates import gpu_attention_simt
from kerneldecl.toolchain import nvcc

H200 = load_arch(REPOSITORY, "h200")
LLAMA = FLOAT32 | {"batch": 1, "heads": 32, "kv_heads": 8, "queries": 2048, "keys": 2048, "head_dim": 128, "causal": True}
FEW = ("head of 42, values of 33", "causal window", "logsumexp", "float8, head of 41, softcap")
SHAPES: dict[str, dict[str, Any]] = {
    "few heads": FLOAT32 | {"batch": 1, "heads": 3, "kv_heads": 3, "queries": 1024, "keys": 1024, "head_dim": 64, "causal": True},
    "llama": LLAMA,
    "head of 256": LLAMA | {"head_dim": 256},
    "encoder": FLOAT32 | {"batch": 16, "heads": 12, "kv_heads": 12, "queries": 197, "keys": 197},
    "mask": LLAMA | {"mask": True, "causal": False},
    "one query": LLAMA | {"queries": 1},
    "head of 41": LLAMA | {"head_dim": 41, "dtype": "float16"},
}


def results(attrs: dict[str, Any], params: dict[str, Any], inputs: list[Any], arch: Any = H200) -> list[Any]:
    return emulated_attention.results(gpu_attention_simt, attrs, PLAIN | params, arch, inputs)


@needs_nvcc
@pytest.mark.parametrize("name", only(FEW, ATTENTIONS))
def test_right_results(name: str) -> None:
    attrs, params = ATTENTIONS[name]
    inputs = rule_of(attrs).inputs(np.random.default_rng(0))
    assert error(attrs, inputs, results(attrs, params, inputs)) <= 1


@needs_nvcc
def test_right_results_without_asynchronous_copies() -> None:
    attrs = FLOAT32 | {"causal": True, "queries": 40}
    inputs = rule_of(attrs).inputs(np.random.default_rng(0))
    assert error(attrs, inputs, results(attrs, {}, inputs, load_arch(REPOSITORY, "t4"))) <= 1


@needs_nvcc
def test_growing_scores_shrink_earlier_results() -> None:
    attrs = {"queries": 64, "keys": 192, "heads": 1}
    inputs = growing_scores(attrs)
    assert error(attrs, inputs, results(attrs, {}, inputs)) <= 1


@needs_nvcc
def test_rows_that_see_no_key_are_zero() -> None:
    """The additive mask hides all keys from some rows, all but the first from others, and the last ones from all."""
    attrs = FLOAT32 | {"mask": True, "queries": 33, "keys": 65, "heads": 1}
    *inputs, mask = rule_of(attrs).inputs(np.random.default_rng(0))
    mask[:7], mask[9, 1:], mask[:, 32:] = -np.inf, -np.inf, -np.inf
    [got] = results(attrs, {}, [*inputs, mask])
    assert (got[:, :, :7] == 0).all()
    assert error(attrs, [*inputs, mask], [got]) <= 1


@pytest.mark.slow
@needs_nvcc
def test_special_values_are_those_of_the_reference() -> None:
    """Products with infinities are what tensor cores cannot split into parts of TF32."""
    attrs = SMALL | FLOAT32 | {"queries": 33, "keys": 65, "causal": True}
    data = make_reference_data({"root": str(REPOSITORY), "rule": "attention", "attrs": attrs, "seed": 1})
    for each in data.sets:
        [got] = results(attrs, {}, list(each.inputs))
        scale = row_scales(each.expected[0], finite_rms(data.expected[0]))
        assert relative_error(got, each.expected[0], scale, any_for_nan=each.any_for_nan) <= rule_of(attrs).tolerance(), each.where


@needs_nvcc
@pytest.mark.slow
def test_a_missing_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    flawed(monkeypatch, lambda source: re.sub(r"cp.async.wait_all;", "cp.async.commit_group;", source))
    attrs = FLOAT32 | {"queries": 65, "keys": 300, "heads": 1}
    with pytest.raises(EmulationError, match=r"still fills|nobody has written|without"):
        results(attrs, {}, rule_of(attrs).inputs(np.random.default_rng(0)))


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("arch", only(("h200",), ("a100-80gb", "rtx-4090", "h200")))
@pytest.mark.parametrize("name", only(("few heads",), SHAPES))
def test_one_of_the_first_proposals_does_not_spill(name: str, arch: str) -> None:
    gpu, mod = load_arch(REPOSITORY, arch), canonical.lower(rule_of(SHAPES[name]))
    sm = gpu.the_gpu.wgmma_arch or str(dict(gpu.tvm_target)["arch"])
    for proposal in policy.propose(iter_space(mod), gpu, 2):
        made = gpu_attention_simt.apply(mod, dict(proposal.candidate.params), gpu)
        assert made is not None
        cubin = compiled_cubin(cuda_source(made, gpu, "kernel"), sm, nvcc.FAST_MATH_FLAGS)
        if not any(usage.spill_bytes or usage.stack_bytes for usage in cubin.usage.values()):
            return
    pytest.fail("both spill")


@needs_nvcc
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_turing_takes_dtypes_that_it_has_no_instructions_for(dtype: str) -> None:
    turing, mod = load_arch(REPOSITORY, "t4"), canonical.lower(rule_of({"dtype": dtype}))
    made = gpu_attention_simt.apply(mod, PLAIN, turing)
    assert made is not None
    cubin = nvcc.compile_cubin(cuda_source(made, turing, "kernel"), "sm_75", nvcc.FAST_MATH_FLAGS)
    assert not any(usage.spill_bytes or usage.stack_bytes for usage in cubin.usage.values())


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"head_dim": 520}, {}),
        ({}, {"warps_m": 3}),
        ({}, {"thread_n": 1}),
        ({}, {"warps_m": 8, "warps_n": 8}),
        ({"head_dim": 256}, {"thread_m": 8}),
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert gpu_attention_simt.apply(canonical.lower(rule_of(FLOAT32 | attrs)), PLAIN | params, H200) is None


@pytest.mark.parametrize("arch", only(("t4", "h200"), ("t4", "a100-80gb", "l4", "h200", "b200")))
@pytest.mark.parametrize("name", only(("few heads", "one query"), SHAPES))
def test_the_policys_proposals_apply(name: str, arch: str) -> None:
    mod, gpu = canonical.lower(rule_of(SHAPES[name])), load_arch(REPOSITORY, arch)
    proposals = policy.propose(iter_space(mod), gpu, 20)
    assert len(proposals) > 3
    assert [each.predicted_secs for each in proposals] == sorted(each.predicted_secs for each in proposals)
    for proposal in proposals[::6]:
        assert gpu_attention_simt.apply(mod, dict(proposal.candidate.params), gpu) is not None, proposal.candidate


def test_few_tiles_share_rows_among_warps() -> None:
    space = iter_space(canonical.lower(rule_of(SHAPES["few heads"])))
    [first] = policy.propose(space, H200, 1)
    params = dict(first.candidate.params)
    assert int(params["warps_n"]) > 1
    assert first.predicted_secs < 5e-5


@pytest.mark.parametrize(("arch", "is_taken"), [("t4", False), ("rtx-4090", True), ("h200", True)])
def test_heads_of_512_are_taken_where_shared_memory_holds_their_keys(arch: str, is_taken: bool) -> None:
    mod, gpu = canonical.lower(rule_of(LLAMA | {"heads": 1, "kv_heads": 1, "head_dim": 512})), load_arch(REPOSITORY, arch)
    proposals = policy.propose(iter_space(mod), gpu, 2)
    assert bool(proposals) == is_taken
    assert all(gpu_attention_simt.apply(mod, dict(each.candidate.params), gpu) is not None for each in proposals)
