"""Attention on mma.sync: right results of every kind on the emulated GPU, code without spills, and None for what it does not take."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError
from support import emulated_attention
from support.attention_cases import FLOAT8
from support.attention_tc_cases import ATTENTIONS, ONE, PLAIN
from support.compilers import compiled_cubin, needs_nvcc
from support.emulated_attention import error, flawed, growing_scores, rule_of
from support.thinned import only

import kerneldecl
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import gpu_attention_tc as policy
from kerneldecl.templates import gpu_attention_tc
from kerneldecl.toolchain import nvcc

ROOT = Path(kerneldecl.__file__).parent.parent
H200 = load_arch(ROOT, "h200")
LLAMA = {"batch": 1, "heads": 32, "kv_heads": 8, "queries": 2048, "keys": 2048, "head_dim": 128, "causal": True}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "encoder": {"batch": 16, "heads": 12, "queries": 197, "keys": 197},
    "head of 256": LLAMA | {"head_dim": 256, "dtype": "bfloat16"},
    "diffusion": {"batch": 2, "heads": 8, "queries": 4096, "keys": 4096, "head_dim": 40},
    "mask": LLAMA | {"mask": True, "causal": False},
    "one query": LLAMA | {"queries": 1},
    "head of 512": {"heads": 1, "queries": 4096, "keys": 4096, "head_dim": 512},
    "float8": {**FLOAT8, "batch": 2, "heads": 12, "queries": 1024, "keys": 1024, "head_dim": 40, "causal": True},
    "head of 320 with a mask": LLAMA | {"head_dim": 320, "mask": True, "causal": False},
}


def results(attrs: dict[str, Any], params: dict[str, Any], inputs: list[Any], seed: int = 1, arch: Arch = H200) -> list[Any]:
    return emulated_attention.results(gpu_attention_tc, attrs, PLAIN | params, arch, inputs, seed)


def _without_third_barrier(source: str) -> str:
    """Return the kernel's source without the barrier between powers and their product with values."""
    third = list(re.finditer(r"\w+cta_sync\(\);", source))[2]
    return source[: third.start()] + source[third.end() :]


@needs_nvcc
@pytest.mark.parametrize(
    "name", only(("causal window", "head of 384, causal, GQA, bfloat16", "float8, packed", "parts of keys, causal, logsumexp"), ATTENTIONS)
)
def test_right_results(name: str) -> None:
    attrs, params = ATTENTIONS[name]
    inputs = rule_of(attrs).inputs(np.random.default_rng(0))
    assert error(attrs, inputs, results(attrs, params, inputs, seed=len(name))) <= 1


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, {"column_warps": 2}, {"split_k": 2}], ids=str)
def test_growing_scores_shrink_earlier_results(params: dict[str, Any]) -> None:
    attrs = {"queries": 64, "keys": 192, "heads": 1}
    inputs = growing_scores(attrs)
    assert error(attrs, inputs, results(attrs, ONE | params, inputs)) <= 1


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("params", [{}, {"column_warps": 2}, {"split_k": 2}, {"split_k": 2, "column_warps": 2, "fma_powers": 8}], ids=str)
def test_nan_and_infinities_are_in_the_results(params: dict[str, Any]) -> None:
    """A query of NaN, a value of NaN, a key of which some scores are minus infinity, and one alone in its block of which all are."""
    attrs = {"queries": 70, "keys": 65, "heads": 1}
    q, k, v = rule_of(attrs).inputs(np.random.default_rng(0))
    q[0, 0, 3, 5] = v[0, 0, 7, 9] = np.nan
    k[0, 0, 10, 0], q[0, 0, 20:, 0] = -np.inf, np.abs(q[0, 0, 20:, 0])
    k[0, 0, 64, 1], q[0, 0, 30:, 1] = -np.inf, np.abs(q[0, 0, 30:, 1])
    assert error(attrs, [q, k, v], results(attrs, params, [q, k, v])) <= 1


@needs_nvcc
@pytest.mark.parametrize("split_k", only((3,), (1, 3)))
def test_rows_that_see_no_key_are_zero(split_k: int) -> None:
    """The additive mask hides all keys from some rows, all but the first from others, and the last ones from all."""
    attrs = {"mask": True, "queries": 33, "keys": 65, "heads": 1}
    *inputs, mask = rule_of(attrs).inputs(np.random.default_rng(0))
    mask[:7], mask[9, 1:], mask[:, 32:] = -np.inf, -np.inf, -np.inf
    [got] = results(attrs, {"split_k": split_k}, [*inputs, mask])
    assert (got[:, :, :7] == 0).all()
    assert error(attrs, [*inputs, mask], [got]) <= 1


@needs_nvcc
@pytest.mark.parametrize("scales", only(((-0.5, 1.5, 1.0),), [((-0.5, 1.5, 1.0),), ((0.0, 1.0, -2.0),), ((1.0, np.nan, 1.0),)]))
def test_float8_has_scales_of_any_kind(scales: tuple[float, ...]) -> None:
    attrs = {**FLOAT8, "queries": 40, "keys": 70, "heads": 1, "head_dim": 40, "causal": True}
    q, k, v, *_ = rule_of(attrs).inputs(np.random.default_rng(0))
    inputs = [q, k, v, *(np.array([scale], "float32") for scale in scales)]
    assert error(attrs, inputs, results(attrs, {"stages": 1}, inputs)) <= 1


@needs_nvcc
@pytest.mark.parametrize("arch", only(("a100-80gb",), ("a100-80gb", "rtx-4090")))
def test_every_float8_becomes_what_it_is(arch: str) -> None:
    """The one key's value is the result: all codes, NaN of either sign among them."""
    attrs = {**FLOAT8, "queries": 1, "keys": 1, "heads": 1, "batch": 1, "head_dim": 8, "value_dim": 256, "out_dtype": "float32"}
    q, k, v, *scales = rule_of(attrs).inputs(np.random.default_rng(0))
    v.reshape(-1).view("uint8")[:] = np.arange(256)
    scales[2][:] = 1
    (got,) = results(attrs, {"stages": 1}, [q, k, v, *scales], arch=load_arch(ROOT, arch))
    assert np.array_equal(got, v.astype("float32"), equal_nan=True)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flaw", "words", "params"),
    [
        (lambda source: source.replace("__syncthreads();", "", 1), "nobody has written|still|race|without", {}),
        (lambda source: re.sub(r"wait_group \d+", "wait_group 7", source), "still fills|nobody has written", {}),
        (_without_third_barrier, "nobody has written", {"column_warps": 2, "warps": 2}),
    ],
    ids=["no barrier", "copies are not waited for", "powers are not waited for"],
)
def test_a_missing_wait_is_noticed(flaw: Callable[[str], str], words: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    flawed(monkeypatch, flaw)
    attrs = {"queries": 65, "keys": 300, "heads": 1}
    with pytest.raises(EmulationError, match=words):
        results(attrs, {"warps": 4} | params, rule_of(attrs).inputs(np.random.default_rng(0)))


@needs_nvcc
@pytest.mark.parametrize("arch", only(("a100-80gb",), ("a100-80gb", "rtx-4090", "h200")))
@pytest.mark.parametrize("name", only(("llama", "head of 512"), SHAPES))
def test_the_first_proposals_do_not_spill(name: str, arch: str) -> None:
    gpu, mod = load_arch(ROOT, arch), canonical.lower(rule_of(SHAPES[name]))
    [first] = policy.propose(iter_space(mod), gpu, 1)
    made = gpu_attention_tc.apply(mod, dict(first.candidate.params), gpu)
    assert made is not None
    sm = gpu.the_gpu.wgmma_arch or str(dict(gpu.tvm_target)["arch"])
    cubin = compiled_cubin(cuda_source(made, gpu, "kernel"), sm, nvcc.FAST_MATH_FLAGS)
    assert not any(usage.spill_bytes or usage.stack_bytes for usage in cubin.usage.values()), first.candidate


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"dtype": "float32"}, {}),
        ({"dtype": "float8_e4m3fn"}, {"stages": 2}),
        ({"dtype": "float8_e4m3fn", "head_dim": 44}, {"stages": 1}),
        ({"head_dim": 68}, {}),
        ({"head_dim": 520}, {"column_warps": 4}),
        ({"head_dim": 512}, {}),
        ({}, {"column_warps": 3}),
        ({}, {"block_n": 40}),
        ({}, {"fragments": 3}),
        ({}, {"stages": 0}),
        ({}, {"stages": 32}),
        ({"head_dim": 256}, {"fragments": 2}),
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert gpu_attention_tc.apply(canonical.lower(rule_of(attrs)), PLAIN | params, H200) is None


def test_the_policy_leaves_float32_alone() -> None:
    space = iter_space(canonical.lower(rule_of({"dtype": "float32"})))
    assert policy.why_not(space, H200)
    assert not policy.propose(space, H200, 1)


def test_keys_are_divided_where_rows_do_not_fill_the_sms() -> None:
    for queries in (512, 1024, 4096):
        space = iter_space(canonical.lower(rule_of(SHAPES["head of 512"] | {"queries": queries, "batch": 1})))
        [first] = policy.propose(space, H200, 1)
        params = dict(first.candidate.params)
        rows = 16 * int(params["warps"]) * int(params["fragments"])
        ctas = -(-queries // rows) * int(params.get("split_k", 1))
        assert ctas > 0.8 * H200.the_gpu.sm_count


def test_none_without_asynchronous_copies() -> None:
    mod, turing = canonical.lower(rule_of({})), load_arch(ROOT, "t4")
    assert gpu_attention_tc.apply(mod, PLAIN, turing) is None
    assert not policy.propose(iter_space(mod), turing, 1)
    assert policy.why_not(iter_space(mod), turing)


@pytest.mark.parametrize("arch", only(("a100-80gb", "l4"), ("h200", "a100-80gb", "rtx-3090", "l4", "rtx-5090")))
@pytest.mark.parametrize("name", only(("one query",), SHAPES))
def test_the_policys_proposals_apply(name: str, arch: str) -> None:
    mod, gpu = canonical.lower(rule_of(SHAPES[name])), load_arch(ROOT, arch)
    proposals = policy.propose(iter_space(mod), gpu, 20)
    assert len(proposals) > 2
    for proposal in proposals[::12]:
        assert gpu_attention_tc.apply(mod, dict(proposal.candidate.params), gpu) is not None, proposal.candidate
