"""Attention against a KV cache: right results on the emulated GPU, nothing read beyond a length, None for what it does not take."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError, host
from support.attention_decode_cases import DECODE, DECODES, PLAIN, PLAIN_ATTENTION, RAGGED, SMALL, ragged_inputs
from support.compilers import compiled_cubin, needs_nvcc
from support.emulated_decode import H200, decoded
from support.repository import REPOSITORY
from support.thinned import at, only

from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_attention_decode as policy
from kerneldecl.templates import gpu_attention_decode
from kerneldecl.toolchain import nvcc

LLAMA = {"batch": 8, "heads": 32, "kv_heads": 8, "keys": 4096, "head_dim": 128}
LATENT = {"batch": 2, "heads": 16, "kv_heads": 1, "keys": 1024, "head_dim": 576, "value_dim": 512, "latent": True, "page_size": 64}


def rule_of(name: str, attrs: dict[str, Any]) -> Any:
    return load_rule(REPOSITORY, name).of(REPOSITORY, SMALL | attrs)


def results(rule: Any, params: dict[str, Any], inputs: list[Any], seed: int = 1) -> Any:
    return decoded(gpu_attention_decode, rule, PLAIN | params, inputs, seed)


@needs_nvcc
@pytest.mark.parametrize("name", only(("clusters and parts", "latent, in pages"), DECODES))
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
    got = results(rule, {"split_k": 2}, inputs)
    assert relative_error(got, want) <= rule.tolerance()
    assert (got[0] == 0).all()
    assert (got[1, :, 0] == 0).all()


@needs_nvcc
@pytest.mark.slow
def test_growing_scores_shrink_earlier_results() -> None:
    rule = rule_of(DECODE, {"batch": 1, "keys": 192})
    q, k, v, lengths = rule.inputs(np.random.default_rng(0))
    q[..., 0], k[..., 0] = 100, np.linspace(-800, 800, 192, dtype=np.float16)
    assert relative_error(results(rule, {"split_k": 2}, [q, k, v, lengths]), rule.reference(q, k, v, lengths)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize(
    ("flaw", "words"),
    at(
        {0},
        [
            (lambda source: re.sub(r"\w+cp_async_wait_group\w*\([^{};]*\);", "", source), "still fills|which nobody has written"),
            (lambda source: re.sub(r"\w+barrier_cluster_wait\w*\(\);", "", source), "cluster"),
        ],
    ),
    ids=["copies are not waited for", "the cluster is not waited for"],
)
def test_a_missing_wait_is_noticed(flaw: Callable[[str], str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = host.lower

    def lower(func: Any, change: Callable[[Any], Any]) -> host.Lowered:
        lowered = sound(func, change)
        flawed = replace(lowered, source=flaw(lowered.source))
        assert flawed.source != lowered.source
        return flawed

    monkeypatch.setattr(host, "lower", lower)
    rule = rule_of(DECODE, {"batch": 1})
    with pytest.raises(EmulationError, match=words):
        results(rule, {"split_k": 2, "cluster": 2}, rule.inputs(np.random.default_rng(0)))


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(
    ("gpu", "arch", "attrs"),
    at(
        {1},
        [
            ("a100-80gb", "sm_80", LLAMA),
            ("h200", "sm_90a", LLAMA | {"page_size": 16}),
            ("rtx-4090", "sm_89", LLAMA | {"queries": 8, "dtype": "bfloat16"}),
            ("h200", "sm_90a", LATENT),
            ("b200", "sm_100a", LLAMA | {"head_dim": 256, "layout": "bshd"}),
        ],
    ),
)
def test_first_choices_compile_without_spills(gpu: str, arch: str, attrs: dict[str, Any]) -> None:
    mod, machine = canonical.lower(rule_of(DECODE, attrs)), load_arch(REPOSITORY, gpu)
    for proposal in policy.propose(iter_space(mod), machine, 20)[:9:4]:
        kernel = gpu_attention_decode.apply(mod, dict(proposal.candidate.params), machine)
        assert kernel is not None
        source = cuda_source(kernel, machine, "kernel")
        usage = compiled_cubin(source, arch, (*nvcc.FAST_MATH_FLAGS, *nvcc.TIRX_FLAGS)).usage.values()
        assert not any(each.stack_bytes + each.spill_bytes for each in usage), proposal


@pytest.mark.parametrize(
    ("name", "attrs", "params"),
    [
        (DECODE, {"dtype": "float32"}, {}),
        (DECODE, {"head_dim": 68}, {}),
        (DECODE, {}, {"rows": 12}),
        (DECODE, {}, {"block_n": 24}),
        (DECODE, {}, {"stages": 1}),
        (DECODE, {}, {"stages": 64}),
        (DECODE, {}, {"split_k": 3, "cluster": 2}),
        (DECODE, {}, {"split_k": 16, "cluster": 16}),
        (DECODE, {"head_dim": 256, "queries": 16}, {"rows": 32}),
        (PLAIN_ATTENTION, {"queries": 1, "mask": True}, {}),
        (PLAIN_ATTENTION, {"queries": 17}, {}),
    ],
)
def test_none_where_it_does_not_apply(name: str, attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert gpu_attention_decode.apply(canonical.lower(rule_of(name, attrs)), PLAIN | params, H200) is None


def test_gpus_without_asynchronous_copies_are_left_to_others() -> None:
    mod, t4 = canonical.lower(rule_of(DECODE, {})), load_arch(REPOSITORY, "t4")
    assert gpu_attention_decode.apply(mod, PLAIN, t4) is None
    assert policy.propose(iter_space(mod), t4, 20) == ()


@pytest.mark.parametrize("gpu", at({0, 2}, ["h200", "a100-80gb", "rtx-4090", "b200"]))
@pytest.mark.parametrize("attrs", at({0}, [LATENT, LLAMA, LLAMA | {"queries": 16, "page_size": 8}, {}, {"keys": 1}, {"head_dim": 256}]))
def test_the_policys_proposals_apply(gpu: str, attrs: dict[str, Any]) -> None:
    mod, arch = canonical.lower(rule_of(DECODE, attrs)), load_arch(REPOSITORY, gpu)
    proposals = policy.propose(iter_space(mod), arch, 1000)
    assert policy.propose(iter_space(mod), arch, 20) == proposals[:20]
    assert len({proposal.candidate for proposal in proposals}) == len(proposals) > 0
    for proposal in (proposals[0], proposals[-1]):
        assert gpu_attention_decode.apply(mod, dict(proposal.candidate.params), arch) is not None, proposal.candidate
