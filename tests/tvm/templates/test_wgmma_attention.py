"""Attention on wgmma: right results of every kind on the emulated GPU, its instructions, and None for what it does not take."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import EmulationError, host
from support import emulated_attention
from support.attention_cases import ATTENTIONS, FLOAT8, ONE, PLAIN, SMS
from support.compilers import compiled_cubin, needs_nvcc, needs_nvdisasm, sass
from support.emulated_attention import error, flawed, growing_scores, rule_of
from support.thinned import at, only

import kerneldecl
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import wgmma_attention as policy
from kerneldecl.templates import wgmma_attention
from kerneldecl.toolchain import nvcc

ROOT = Path(kerneldecl.__file__).parent.parent
H200 = load_arch(ROOT, "h200")
FEW_SMS = replace(H200, gpu=replace(H200.the_gpu, sm_count=SMS))
LLAMA = {"batch": 1, "heads": 64, "kv_heads": 8, "queries": 4096, "keys": 4096, "head_dim": 128}


def results(attrs: dict[str, Any], params: dict[str, Any], inputs: list[Any], seed: int = 1) -> list[Any]:
    return emulated_attention.results(wgmma_attention, attrs, PLAIN | params, FEW_SMS, inputs, seed)


@needs_nvcc
@pytest.mark.parametrize("name", only(("bshd, GQA, bfloat16",), ATTENTIONS))
def test_right_results(name: str) -> None:
    attrs, params = ATTENTIONS[name]
    inputs = rule_of(attrs).inputs(np.random.default_rng(0))
    assert error(attrs, inputs, results(attrs, params, inputs, seed=len(name))) <= 1


@needs_nvcc
@pytest.mark.slow
def test_growing_scores_shrink_earlier_results() -> None:
    attrs = {"queries": 64, "keys": 192, "heads": 1}
    inputs = growing_scores(attrs)
    assert error(attrs, inputs, results(attrs, ONE, inputs)) <= 1


@needs_nvcc
@pytest.mark.slow
def test_rows_that_see_no_key_are_zero() -> None:
    attrs = {"causal": True, "queries": 129, "keys": 65}
    inputs = rule_of(attrs).inputs(np.random.default_rng(0))
    (got,) = results(attrs, {}, inputs)
    assert (got[:, :, :64] == 0).all()
    assert (got[:, :, 64:] != 0).any(axis=-1).all()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("fma_powers", [0, 8])
def test_nan_and_infinities_are_in_the_results(fma_powers: int) -> None:
    """A query of NaN, a value of NaN, a key of which some scores are minus infinity, and one alone in its block of which all are."""
    attrs = {"queries": 70, "keys": 65, "heads": 1}
    q, k, v = rule_of(attrs).inputs(np.random.default_rng(0))
    q[0, 0, 3, 5] = v[0, 0, 7, 9] = np.nan
    k[0, 0, 10, 0], q[0, 0, 20:, 0] = -np.inf, np.abs(q[0, 0, 20:, 0])
    k[0, 0, 64, 1], q[0, 0, 30:, 1] = -np.inf, np.abs(q[0, 0, 30:, 1])
    assert error(attrs, [q, k, v], results(attrs, {"fma_powers": fma_powers}, [q, k, v])) <= 1


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("scales", [(-0.5, 1.5, 1.0), (0.0, 1.0, -2.0), (np.nan, 1.0, 1.0), (1.0, 1.0, np.nan)])
def test_float8_has_scales_of_any_kind(scales: tuple[float, ...]) -> None:
    attrs = {**FLOAT8, "queries": 40, "keys": 70, "heads": 1, "causal": True}
    q, k, v, *_ = rule_of(attrs).inputs(np.random.default_rng(0))
    inputs = [q, k, v, *(np.array([scale], "float32") for scale in scales)]
    assert error(attrs, inputs, results(attrs, ONE, inputs)) <= 1


@needs_nvcc
@pytest.mark.slow
def test_float8_has_nan_and_zeros_where_the_rule_has() -> None:
    attrs = {**FLOAT8, "queries": 130, "keys": 65, "heads": 1, "causal": True}
    q, k, v, *scales = rule_of(attrs).inputs(np.random.default_rng(0))
    q[0, 0, 80, 5] = v[0, 0, 7, 9] = np.nan
    (got,) = results(attrs, {}, [q, k, v, *scales])
    assert error(attrs, [q, k, v, *scales], [got]) <= 1
    assert (np.delete(got[:, :, :65], 9, axis=3) == 0).all(), "these see no key"


UNFILLED = "which an asynchronous copy still fills|which nobody has written"
WAIT = r"tvm_builtin_cuda_mbarrier_wait\([^;]*\b{}_state_stage_ptr{}\[[^;]*;"


@needs_nvcc
@pytest.mark.parametrize(
    ("flaw", "words", "more"),
    at(
        {0},
        [
            (lambda source: re.sub(WAIT.format("v", "_1"), "", source), UNFILLED, {}),
            (lambda source: re.sub(WAIT.format("k", ""), "", source), "arrives at the barrier .* more often", {}),
            (lambda source: re.sub(r"\w+fence_proxy\w+\(\);", "", source), "without fence.proxy.async", {}),
            (lambda source: re.sub(r"\w+wait_group_read\w*\([^{};]*\);", "", source), "still being read asynchronously", {}),
            (lambda source: re.sub(WAIT.format("v", "_1"), "", source), UNFILLED, FLOAT8),
            (lambda source: re.sub(r"\w+griddepcontrol_wait\w*\(\);", "", source), "before griddepcontrol.wait", FLOAT8),
        ],
    ),
    ids=[
        "values are not waited for",
        "stages are not waited for",
        "no fence before the store",
        "the store is not waited for",
        "transposed values are not waited for",
        "the kernel before is not waited for",
    ],
)
def test_a_missing_wait_is_noticed(flaw: Callable[[str], str], words: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    flawed(monkeypatch, flaw)
    attrs = {"queries": 300, "keys": 300, "heads": 1, **more}
    with pytest.raises(EmulationError, match=words):
        results(attrs, {}, rule_of(attrs).inputs(np.random.default_rng(0)))


@needs_nvcc
@needs_nvdisasm
@pytest.mark.slow
@pytest.mark.parametrize(
    "attrs",
    [
        LLAMA | {"causal": True},
        LLAMA,
        LLAMA | {"head_dim": 64, "kv_heads": 64},
        LLAMA | {"head_dim": 256, "dtype": "bfloat16"},
        LLAMA | FLOAT8,
        LLAMA | FLOAT8 | {"head_dim": 256, "causal": True},
    ],
)
def test_softmax_runs_while_results_are_multiplied(attrs: dict[str, Any], tmp_path: Path) -> None:
    mod = canonical.lower(rule_of(attrs))
    [first] = policy.propose(iter_space(mod), H200, 1)
    params = dict(first.candidate.params)
    assert params["overlap"]
    kernel = wgmma_attention.apply(mod, params, H200)
    assert kernel is not None
    cubin = compiled_cubin(host.lower(kernel["main"]).source, "sm_90a", nvcc.FAST_MATH_FLAGS)
    assert not any(usage.spill_bytes for usage in cubin.usage.values())
    code = sass(cubin.content, tmp_path)
    # In the loop's body, scores are there once one group of wgmmas is left, and results once none is.
    body = code[code.rindex("DEPBAR.LE gsb0, 0x1") :]
    softmax = body[: body.index("DEPBAR.LE gsb0, 0x0")]
    assert softmax.count("MUFU.EX2") >= int(params["block_n"]) // 2 * (8 - int(params["fma_powers"])) // 8
    assert re.search(r"GMMA\.64x\d+x(16|32)\.F32[^\n]*R\d+, R\d+, gdesc", code), "powers are an operand in registers"


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"dtype": "float32"}, {}),
        (FLOAT8 | {"out_dtype": "float32"}, {}),
        (FLOAT8 | {"head_dim": 72}, {}),
        (FLOAT8, {"block_n": 48}),
        (FLOAT8, {"cluster": 2, "heads_together": 2}),
        ({"out_dtype": "float32"}, {}),
        ({"window": 9}, {"cluster": 2, "heads_together": 1, "consumers": 1}),
        ({"head_dim": 68}, {}),
        ({"head_dim": 264}, {}),
        ({"value_dim": 264}, {}),
        ({}, {"consumers": 5}),
        ({}, {"block_n": 72}),
        ({}, {"consumers": 3, "block_n": 192}),
        ({}, {"stages": 1}),
        ({}, {"stages": 16}),
        ({}, {"consumers": 1}),
    ],
)
def test_none_where_it_does_not_apply(attrs: dict[str, Any], params: dict[str, Any]) -> None:
    assert wgmma_attention.apply(canonical.lower(rule_of(attrs)), PLAIN | params, H200) is None


@pytest.mark.parametrize(
    "attrs",
    at({1}, [LLAMA, LLAMA | {"causal": True, "dtype": "bfloat16", "queries": 1}, {}, {"head_dim": 40}, {"head_dim": 256, "queries": 1000}]),
)
def test_the_policys_proposals_apply(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(attrs))
    proposals = policy.propose(iter_space(mod), H200, 20)
    assert len(proposals) > 3
    for proposal in proposals[::5]:
        assert wgmma_attention.apply(mod, dict(proposal.candidate.params), H200) is not None, proposal.candidate


@pytest.mark.parametrize("attrs", [{"dtype": "float32"}, FLOAT8 | {"head_dim": 72}, {"out_dtype": "float32"}, {"head_dim": 68}])
def test_the_policy_proposes_nothing_where_the_template_does_not_apply(attrs: dict[str, Any]) -> None:
    space = iter_space(canonical.lower(rule_of(attrs)))
    assert not policy.propose(space, H200, 20)
    assert policy.why_not(space, H200)
