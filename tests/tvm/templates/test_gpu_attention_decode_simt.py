"""Attention against a KV cache on CUDA cores: right results on the emulated GPU, nothing read beyond a length, no spills, no fallback."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import EmulationError
from support.attention_decode_cases import DECODE, PLAIN_ATTENTION, RAGGED, ragged_inputs
from support.attention_decode_simt_cases import DECODES, PLAIN, SMALL
from support.compilers import compiled_cubin, needs_nvcc
from support.emulated_attention import flawed
from support.emulated_decode import H200, decoded
from support.repository import REPOSITORY
from support.thinned import at, only

from kerneldecl.arrays import finite_rms, relative_error, row_scales
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.plugins.policy_order import standard_order
from kerneldecl.policies import gpu_attention_decode_simt as policy
from kerneldecl.runners.reference_data import make_reference_data
from kerneldecl.templates import gpu_attention_decode_simt
from kerneldecl.toolchain import nvcc

GROUPS = {"batch": 15, "heads": 8, "kv_heads": 2, "keys": 5061, "head_dim": 128}
ONE_HEAD = {"batch": 2, "heads": 8, "kv_heads": 1, "keys": 1984, "head_dim": 64}
EACH_HEAD = {"batch": 4, "heads": 16, "kv_heads": 16, "keys": 4096, "head_dim": 128}
LATENT = {"batch": 2, "heads": 16, "kv_heads": 1, "keys": 1024, "head_dim": 576, "value_dim": 512, "latent": True, "page_size": 64}
GPUS = ("h200", "a100-80gb", "rtx-4090", "t4")


def rule_of(name: str, attrs: dict[str, Any]) -> Any:
    return load_rule(REPOSITORY, name).of(REPOSITORY, SMALL | attrs)


def results(rule: Any, params: dict[str, Any], inputs: list[Any], seed: int = 1) -> Any:
    return decoded(gpu_attention_decode_simt, rule, PLAIN | params, inputs, seed)


@needs_nvcc
@pytest.mark.parametrize("name", only(("parts shorter than a block", "pages of three keys", "latent, in pages"), DECODES))
def test_right_results(name: str) -> None:
    rule_name, attrs, params = DECODES[name]
    rule = rule_of(rule_name, attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    assert relative_error(results(rule, params, inputs, seed=len(name)), rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
def test_nothing_beyond_a_sequences_length_matters() -> None:
    """Neither what a cache has there, nor the numbers of pages; a sequence without keys gives zeros, and a query before the first key."""
    rule = rule_of(DECODE, RAGGED)
    inputs, want = ragged_inputs(rule)
    for split_k in (1, 2):
        got = results(rule, {"split_k": split_k}, inputs)
        assert relative_error(got, want) <= rule.tolerance()
        assert (got[0] == 0).all()
        assert (got[1, :, 0] == 0).all()


@needs_nvcc
def test_lengths_beyond_the_cache_are_cut() -> None:
    rule = rule_of(DECODE, {"keys": 20})
    *inputs, lengths = rule.inputs(np.random.default_rng(0))
    lengths[:] = 20
    want = rule.reference(*inputs, lengths)
    assert relative_error(results(rule, {}, [*inputs, np.array([1000, 20], np.int32)]), want) <= rule.tolerance()


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("attrs", at({0}, [{}, {"queries": 3, "page_size": 16, "keys": 96}, {"latent": True, "value_dim": 32}]))
def test_special_values_are_those_of_the_reference(attrs: dict[str, Any]) -> None:
    """Infinities of a sequence's last value stay what they are beside keys that are not there."""
    data = make_reference_data({"root": str(REPOSITORY), "rule": DECODE, "attrs": SMALL | {"keys": 99} | attrs, "seed": 1})
    rule = rule_of(DECODE, {"keys": 99} | attrs)
    for each in data.sets:
        got = results(rule, {"split_k": 2}, list(each.inputs))
        scale = row_scales(each.expected[0], finite_rms(data.expected[0]))
        assert relative_error(got, each.expected[0], scale, any_for_nan=each.any_for_nan) <= rule.tolerance(), each.where


@needs_nvcc
def test_an_infinite_last_value_is_not_multiplied_by_zero() -> None:
    rule = rule_of(DECODE, {"batch": 1, "keys": 33})
    q, k, v, lengths = rule.inputs(np.random.default_rng(0))
    lengths[:], v[:, :, 32, 5] = 33, np.inf
    got = results(rule, {}, [q, k, v, lengths])
    assert (got[..., 5] == np.inf).all()


@needs_nvcc
@pytest.mark.parametrize("split_k", at({1}, [1, 3]))
def test_growing_scores_shrink_earlier_results(split_k: int) -> None:
    rule = rule_of(DECODE, {"batch": 1, "keys": 192})
    q, k, v, lengths = rule.inputs(np.random.default_rng(0))
    q[..., 0], k[..., 0] = 100, np.linspace(-800, 800, 192)
    assert relative_error(results(rule, {"split_k": split_k}, [q, k, v, lengths]), rule.reference(q, k, v, lengths)) <= rule.tolerance()


@needs_nvcc
def test_results_are_the_same_bits_in_whatever_order_threads_run() -> None:
    rule = rule_of(DECODE, {})
    inputs = rule.inputs(np.random.default_rng(0))
    first, second = (results(rule, {"split_k": 3, "warps": 4}, inputs, seed) for seed in (1, 2))
    assert first.tobytes() == second.tobytes()


@needs_nvcc
@pytest.mark.parametrize("wait", only(("__syncthreads",), ("__syncthreads", "__syncwarp")))
def test_a_missing_wait_is_noticed(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flawed(monkeypatch, lambda source: source.replace(f"{wait}();", ";"))
    rule = rule_of(DECODE, {"batch": 1, "keys": 17})
    inputs = rule.inputs(np.random.default_rng(0))

    def with_some_order() -> None:
        for seed in range(4):
            results(rule, {"warps": 4}, inputs, seed)

    with pytest.raises(EmulationError, match="nobody has written"):
        with_some_order()


@needs_nvcc
@pytest.mark.parametrize(
    ("gpu", "sm", "attrs"),
    at(
        {4},
        [
            ("h200", "sm_90a", GROUPS),
            ("h200", "sm_90a", ONE_HEAD),
            ("h200", "sm_90a", EACH_HEAD | {"page_size": 16}),
            ("h200", "sm_90a", LATENT),
            ("a100-80gb", "sm_80", GROUPS),
            ("a100-80gb", "sm_80", GROUPS | {"queries": 9}),
            ("a100-80gb", "sm_80", GROUPS | {"head_dim": 42, "value_dim": 40}),
            ("rtx-4090", "sm_89", EACH_HEAD | {"head_dim": 256}),
            ("rtx-4090", "sm_89", LATENT),
            ("b200", "sm_100a", GROUPS | {"layout": "bshd"}),
            ("t4", "sm_75", GROUPS),
            ("t4", "sm_75", GROUPS | {"dtype": "bfloat16"}),
        ],
    ),
)
def test_first_choices_compile_without_spills(gpu: str, sm: str, attrs: dict[str, Any]) -> None:
    mod, machine = canonical.lower(rule_of(DECODE, attrs)), load_arch(REPOSITORY, gpu)
    proposals = policy.propose(iter_space(mod), machine, 20)[:9:4]
    assert proposals
    for proposal in proposals:
        kernel = gpu_attention_decode_simt.apply(mod, dict(proposal.candidate.params), machine)
        assert kernel is not None
        usage = compiled_cubin(cuda_source(kernel, machine, "kernel"), sm, (*nvcc.FLAGS, *nvcc.TIRX_FLAGS)).usage.values()
        assert not any(each.stack_bytes + each.spill_bytes for each in usage), proposal


@pytest.mark.parametrize(
    ("name", "attrs", "params"),
    [
        (DECODE, {"value_dim": 62}, {}),
        (DECODE, {}, {"rows": 0}),
        (DECODE, {"queries": 16}, {"rows": 17}),
        (DECODE, {}, {"lanes": 2}),
        (DECODE, {}, {"unroll": 3}),
        (DECODE, {}, {"split_k": 0}),
        (DECODE, {}, {"warps": 64}),
        (DECODE, {"head_dim": 256}, {"rows": 8}),
        (PLAIN_ATTENTION, {"queries": 1, "mask": True}, {}),
        (PLAIN_ATTENTION, {"queries": 17}, {}),
    ],
)
def test_none_where_it_does_not_apply(name: str, attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert gpu_attention_decode_simt.apply(canonical.lower(rule_of(name, attrs)), PLAIN | params, H200) is None


def test_what_mma_sync_takes_is_left_to_it() -> None:
    space = iter_space(canonical.lower(rule_of(DECODE, {"dtype": "float16"})))
    assert policy.propose(space, H200, 20) == ()
    assert policy.propose(space, load_arch(REPOSITORY, "t4"), 20)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("attrs", at({0, 2}, [GROUPS, ONE_HEAD, LATENT]))
def test_auto_has_a_kernel_before_the_fallback(gpu: str, attrs: dict[str, Any]) -> None:
    space, arch = iter_space(canonical.lower(rule_of(DECODE, attrs))), load_arch(REPOSITORY, gpu)
    asked = (load_module("policies", REPOSITORY, name).propose(space, arch, 1) for name in standard_order("cuda"))
    first = next(proposals for proposals in asked if proposals)
    assert first[0].candidate.template == "gpu_attention_decode_simt"


@pytest.mark.parametrize("gpu", at({0, 4}, ["h200", "a100-80gb", "rtx-4090", "b200", "t4"]))
@pytest.mark.parametrize(
    "attrs", at({0, 1}, [LATENT, GROUPS, GROUPS | {"queries": 16, "page_size": 7}, {}, {"keys": 1}, {"head_dim": 256}])
)
def test_the_policys_proposals_apply(gpu: str, attrs: dict[str, Any]) -> None:
    mod, arch = canonical.lower(rule_of(DECODE, attrs)), load_arch(REPOSITORY, gpu)
    proposals = policy.propose(iter_space(mod), arch, 1000)
    assert policy.propose(iter_space(mod), arch, 20) == proposals[:20]
    assert len({proposal.candidate for proposal in proposals}) == len(proposals) > 0
    for proposal in (proposals[0], proposals[-1]):
        assert gpu_attention_decode_simt.apply(mod, dict(proposal.candidate.params), arch) is not None, proposal.candidate


def test_keys_are_split_where_heads_leave_sms_idle() -> None:
    few, many = (iter_space(canonical.lower(rule_of(DECODE, EACH_HEAD | {"batch": batch}))) for batch in (1, 64))
    splits = [int(dict(policy.propose(space, H200, 1)[0].candidate.params)["split_k"]) for space in (few, many)]
    assert splits[0] >= 8
    assert splits[1] < splits[0]


def test_many_queries_without_lengths_are_left_to_tiles() -> None:
    """Of 16 queries of each of 256 heads tiles are predicted to be faster; of one query, splits."""
    attrs = {"batch": 8, "heads": 32, "kv_heads": 32, "keys": 256, "head_dim": 128}
    one, many = (iter_space(canonical.lower(rule_of(PLAIN_ATTENTION, attrs | {"queries": queries}))) for queries in (1, 16))
    assert policy.propose(one, H200, 1)
    assert policy.propose(many, H200, 1) == ()
