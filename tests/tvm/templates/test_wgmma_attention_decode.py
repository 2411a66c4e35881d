"""Attention against a KV cache on wgmma: right results on the emulated GPU, its waits, None for what it does not take."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError, host
from support.attention_decode_cases import DECODE, PLAIN_ATTENTION
from support.compilers import compiled_cubin, needs_nvcc, needs_nvdisasm, sass
from support.emulated_attention import flawed
from support.emulated_decode import H200, decoded
from support.repository import REPOSITORY
from support.thinned import at, only
from support.wgmma_decode_cases import DECODES, LATENT, PLAIN, SMALL

from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_attention_decode as mma_sync
from kerneldecl.policies import wgmma_attention_decode as policy
from kerneldecl.templates import wgmma_attention_decode
from kerneldecl.toolchain import nvcc

MLA = {"batch": 64, "heads": 128, "keys": 4096, "head_dim": 576, "value_dim": 512, "latent": True, "page_size": 64}
QUERIES = {"batch": 32, "heads": 64, "kv_heads": 8, "queries": 16, "keys": 4096, "head_dim": 128}


def rule_of(name: str, attrs: dict[str, Any]) -> Any:
    return load_rule(REPOSITORY, name).of(REPOSITORY, SMALL | attrs)


def results(rule: Any, params: dict[str, Any], inputs: list[Any], seed: int = 1) -> Any:
    return decoded(wgmma_attention_decode, rule, PLAIN | params, inputs, seed)


@needs_nvcc
@pytest.mark.parametrize("name", only(("parts in pages, in turns",), DECODES))
def test_right_results(name: str) -> None:
    rule_name, attrs, params = DECODES[name]
    rule = rule_of(rule_name, attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    assert relative_error(results(rule, params, inputs, seed=len(name)), rule.reference(*inputs)) <= rule.tolerance()


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("split_k", at({1}, [1, 2]))
def test_nothing_beyond_a_sequences_length_matters(split_k: int) -> None:
    """Neither what a cache has there, nor the numbers of pages; a sequence without keys gives zeros, and a query before the first key."""
    rule = rule_of(DECODE, LATENT | {"batch": 5, "page_size": 16, "keys": 192, "queries": 2, "pages": 70})
    q, k, table, lengths = rule.inputs(np.random.default_rng(0))
    lengths[:] = 0, 1, 65, 129, 192
    want = rule.reference(q, k, table, lengths)
    for sequence, length in enumerate(lengths):
        pages = -(-length // 16)
        k[table[sequence, pages:]] = np.nan
        if length % 16:
            k[table[sequence, pages - 1], :, length % 16 :] = np.nan
        table[sequence, pages:] = -(2**31)
    got = results(rule, {"split_k": split_k}, [q, k, table, lengths])
    assert relative_error(got, want) <= rule.tolerance()
    assert (got[0] == 0).all()
    assert (got[1, :, 0] == 0).all()


@needs_nvcc
@pytest.mark.slow
def test_nothing_beyond_the_length_of_keys_and_values_apart_matters() -> None:
    rule = rule_of(DECODE, {"batch": 3, "head_dim": 128, "keys": 160})
    q, k, v, lengths = rule.inputs(np.random.default_rng(0))
    lengths[:] = 0, 33, 130
    want = rule.reference(q, k, v, lengths)
    for sequence, length in enumerate(lengths):
        k[sequence, :, length:] = v[sequence, :, length:] = np.nan
    assert relative_error(results(rule, {"stages": 4}, [q, k, v, lengths]), want) <= rule.tolerance()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("sign", [1, -1])
def test_growing_scores_shrink_earlier_results(sign: int) -> None:
    """Maxima grow in the blocks of both consumers, each of which has to follow the other's."""
    rule = rule_of(DECODE, LATENT | {"batch": 1, "keys": 400})
    q, k, lengths = rule.inputs(np.random.default_rng(0))
    q[..., 190], k[..., 190] = 100, sign * np.linspace(-800, 800, 400, dtype=np.float16)
    assert relative_error(results(rule, {"split_k": 2}, [q, k, lengths]), rule.reference(q, k, lengths)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.slow
def test_nan_reaches_the_results_of_both_consumers() -> None:
    rule = rule_of(DECODE, LATENT | {"batch": 1, "keys": 300})
    q, k, lengths = rule.inputs(np.random.default_rng(0))
    q[0, 3, 0, 5] = np.nan
    got = results(rule, {}, [q, k, lengths])
    assert np.isnan(got[0, 3]).all()
    assert not np.isnan(np.delete(got[0], 3, axis=0)).any()


def without(pattern: str) -> Callable[[str], str]:
    return lambda source: re.sub(pattern, "", source)


UNFILLED = "which an asynchronous copy still fills|which nobody has written"
WAIT = r"tvm_builtin_cuda_mbarrier_wait\(\(&[^;]*\b{}\w*\[0\] \*[^;]*;"


@needs_nvcc
@pytest.mark.parametrize(
    ("flaw", "words"),
    at(
        {0},
        [
            (without(r"\w+bar_sync_count_sync\(\(uint\)1, \(uint\)256\);"), "which nobody has written"),
            (without(r"\w+fence_proxy\w+\(\);"), "without fence.proxy.async"),
            (without(r"\w+bar_sync_count_sync\(\(uint\)2, \(uint\)256\);"), "which nobody has written|without fence.proxy.async"),
            (without(WAIT.format("_ptr_")), UNFILLED),
            (without(WAIT.format("state_stage_ptr")), "arrives at the barrier .* more often|still being read asynchronously"),
        ],
    ),
    ids=[
        "the first consumer's powers are not waited for",
        "no fence after powers",
        "the second consumer's powers are not waited for",
        "keys are not waited for",
        "stages are not waited for",
    ],
)
def test_a_missing_wait_is_noticed(flaw: Callable[[str], str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flawed(monkeypatch, flaw)
    rule = rule_of(DECODE, LATENT | {"batch": 1})
    with pytest.raises(EmulationError, match=words):
        results(rule, {}, rule.inputs(np.random.default_rng(0)))


@pytest.mark.slow
@needs_nvcc
@needs_nvdisasm
@pytest.mark.parametrize(
    ("attrs", "params"),
    at(
        {0},
        [
            (MLA, {}),
            (MLA | {"page_size": 8, "queries": 2, "dtype": "bfloat16"}, {"cluster": 2, "split_k": 2}),
            (MLA | {"page_size": 0, "layout": "bshd"}, {}),
            (QUERIES | {"page_size": 16}, {"stages": 6}),
            (QUERIES | {"value_dim": 384}, {}),
        ],
    ),
)
def test_no_spills_and_values_are_read_where_keys_are(attrs: dict[str, Any], params: dict[str, Any], tmp_path: Path) -> None:
    rule = rule_of(DECODE, attrs)
    kernel = wgmma_attention_decode.apply(canonical.lower(rule), PLAIN | params, H200)
    assert kernel is not None
    cubin = compiled_cubin(host.lower(kernel["main"]).source, "sm_90a", (*nvcc.FAST_MATH_FLAGS, *nvcc.TIRX_FLAGS))
    assert not any(usage.spill_bytes + usage.stack_bytes for usage in cubin.usage.values())
    code = sass(cubin.content, tmp_path)
    columns = rule._value_dim // 2
    products = re.findall(rf"HGMMA\.64x{columns}x16[^\n]*", code)
    assert len([line for line in products if ".tnspB" in line]) == 4 * 4, "two consumers, each with both blocks' powers: four steps each"
    assert sum(bool(re.search(r"R\d+, R\d+, gdesc", line)) for line in products) == 2 * 4, "its own powers are in registers"


@pytest.mark.parametrize(
    ("name", "attrs", "params"),
    [
        (DECODE, LATENT | {"dtype": "float32"}, {}),
        (DECODE, {"head_dim": 64}, {}),
        (DECODE, {"head_dim": 68, "value_dim": 128}, {}),
        (DECODE, {"head_dim": 64, "value_dim": 640}, {}),
        (DECODE, {"latent": True, "head_dim": 128, "value_dim": 128}, {}),
        (DECODE, LATENT | {"page_size": 4}, {}),
        (DECODE, LATENT, {"stages": 3}),
        (DECODE, LATENT, {"stages": 0}),
        (DECODE, LATENT, {"stages": 10}),
        (DECODE, LATENT, {"cluster": 2}),
        (DECODE, LATENT | {"heads": 128}, {"cluster": 4}),
        (DECODE, LATENT, {"split_k": 0}),
        (DECODE, LATENT, {"turns": 2}),
        (PLAIN_ATTENTION, {"queries": 1, "mask": True, "head_dim": 128}, {}),
        (PLAIN_ATTENTION, {"queries": 17, "head_dim": 128}, {}),
    ],
)
def test_none_where_it_does_not_apply(name: str, attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert wgmma_attention_decode.apply(canonical.lower(rule_of(name, attrs)), PLAIN | params, H200) is None


@pytest.mark.parametrize("gpu", ["a100-80gb", "rtx-4090", "b200"])
def test_gpus_without_wgmma_are_left_to_others(gpu: str) -> None:
    mod, arch = canonical.lower(rule_of(DECODE, MLA)), load_arch(REPOSITORY, gpu)
    assert wgmma_attention_decode.apply(mod, PLAIN, arch) is None
    assert not policy.propose(iter_space(mod), arch, 20)
    assert policy.why_not(iter_space(mod), arch) == "the GPU has no wgmma"


@pytest.mark.parametrize("gpu", at({0}, ["h200", "h100-sxm", "h100-pcie", "gh200"]))
@pytest.mark.parametrize("attrs", at({0}, [MLA, MLA | {"batch": 8, "page_size": 0}, MLA | {"batch": 3, "page_size": 16, "queries": 2}]))
def test_the_policys_proposals_apply(gpu: str, attrs: dict[str, Any]) -> None:
    mod, arch = canonical.lower(rule_of(DECODE, attrs)), load_arch(REPOSITORY, gpu)
    proposals = policy.propose(iter_space(mod), arch, 1000)
    assert policy.propose(iter_space(mod), arch, 2) == proposals[:2]
    assert len({proposal.candidate for proposal in proposals}) == len(proposals) > 1
    for proposal in (proposals[0], proposals[-1]):
        assert wgmma_attention_decode.apply(mod, dict(proposal.candidate.params), arch) is not None, proposal.candidate


@pytest.mark.parametrize(
    "attrs", at({1, 3}, [{"head_dim": 64}, {"head_dim": 128, "kv_heads": 4}, MLA | {"page_size": 4}, MLA | {"batch": 1}])
)
def test_the_policy_leaves_others_to_mma_sync(attrs: dict[str, Any]) -> None:
    space = iter_space(canonical.lower(rule_of(DECODE, attrs)))
    assert not policy.propose(space, H200, 20)
    assert policy.why_not(space, H200)
    assert mma_sync.propose(space, H200, 20)
