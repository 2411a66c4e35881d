"""Attention against a KV cache on CPUs: right results of every form, nothing is read beyond lengths or arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from support.cpus import AVX2, SSE, runnable
from support.guarded import touched_outside
from support.repository import REPOSITORY
from support.thinned import at
from support.unoptimised import unoptimised

from kerneldecl.arrays import aligned, finite_rms, poisoned, relative_error, row_scales
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import cpu_attention_decode as policy
from kerneldecl.templates import cpu_attention_decode as template

ARCH = runnable(AVX2)
SMALL: dict[str, Any] = {"batch": 3, "heads": 6, "kv_heads": 2, "keys": 150, "head_dim": 24, "dtype": "float32"}
PARAMS = {"rows": 3, "tile_m": 1, "tile_n": 2}


def rule_of(attrs: dict[str, Any], name: str = "attention_decode") -> Any:
    rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    assert list(rule.problems()) == []
    return rule


def built(rule: Any, params: dict[str, Any], arch: Any = ARCH) -> Any:
    mod = template.apply(canonical.lower(rule), params, arch)
    assert mod is not None
    return tvm.compile(mod, target=unoptimised(arch), tir_pipeline=PIPELINE)["main"]


def result(rule: Any, params: dict[str, Any], inputs: list[Any], arch: Any = ARCH) -> Any:
    out = aligned(poisoned(rule.signature().outputs[0]))
    built(rule, params, arch)(*(tensor(aligned(array)) for array in inputs), tensor(out))
    return out


def error_of(got: Any, want: Any) -> float:
    return float(relative_error(got, want, row_scales(want, finite_rms(want))))


@pytest.mark.parametrize(
    "attrs",
    at(
        {3, 5, 6},
        [
            {},
            {"queries": 3, "layout": "bshd"},
            {"queries": 4, "kv_heads": 0, "dtype": "float16"},
            {"dtype": "bfloat16", "value_dim": 40},
            {"page_size": 10, "queries": 2},
            {"page_size": 50, "pages": 7, "layout": "bshd", "dtype": "float16"},
            {"latent": True, "kv_heads": 1, "value_dim": 16, "scale": 0.3},
            {"heads": 1, "kv_heads": 1, "batch": 1, "keys": 1},
        ],
    ),
    ids=lambda attrs: ",".join(f"{name}={value}" for name, value in attrs.items()) or "plain",
)
def test_proposals_compute_the_reference(attrs: dict[str, Any]) -> None:
    rule = rule_of(SMALL | attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    proposals = policy.propose(iter_space(canonical.lower(rule)), ARCH, 1000)
    want = rule.reference(*inputs)
    for each in {proposals[0], proposals[-1]}:
        out = result(rule, dict(each.candidate.params), inputs)
        assert error_of(out, want) <= rule.tolerance(), each


def test_tasks_have_some_of_the_rows_where_heads_of_keys_are_few() -> None:
    rule = rule_of(SMALL | {"batch": 1, "heads": 8, "kv_heads": 1})
    proposals = policy.propose(iter_space(canonical.lower(rule)), ARCH, 1000)
    assert {dict(each.candidate.params)["rows"] for each in proposals} == {8, 1}
    inputs = rule.inputs(np.random.default_rng(0))
    for params in ({"rows": 2, "tile_m": 2, "tile_n": 3}, {"rows": 5, "tile_m": 4, "tile_n": 1}):
        assert error_of(result(rule, params, inputs), rule.reference(*inputs)) <= rule.tolerance()


def test_sequences_without_keys_give_zeros_and_what_lies_beyond_is_not_read() -> None:
    rule = rule_of(SMALL | {"queries": 2})
    q, k, v, _ = rule.inputs(np.random.default_rng(0))
    lengths = np.array([0, 1, 37], "int32")
    for cache in (k, v):
        for sequence, length in zip(cache, lengths, strict=True):
            sequence[:, length:] = np.nan
    out = result(rule, PARAMS, [q, k, v, lengths])
    assert not out[0].any()
    assert not out[1, :, 0].any(), "its first query's own key is none"
    assert error_of(out, rule.reference(q, k, v, lengths)) <= rule.tolerance()


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("attrs", [{}, {"page_size": 10, "queries": 2}])
def test_nothing_outside_of_the_arguments_is_touched(attrs: dict[str, Any], at_end: bool) -> None:
    """Arguments lie beside pages that must not be read."""
    rule = rule_of(SMALL | attrs)
    assert touched_outside(rule, built(rule, PARAMS), at_end=at_end) == ""


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("attention", {"batch": 1, "heads": 2, "queries": 4, "keys": 16, "head_dim": 8}),
        ("matmul", {"m": 8, "n": 8, "k": 8}),
        ("attention_decode", SMALL | {"head_dim": 25}),
    ],
)
def test_other_computations_and_rows_without_vectors_are_none(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(attrs, name))
    assert template.apply(mod, PARAMS, ARCH) is None
    assert policy.propose(iter_space(mod), ARCH, 5) == ()


def test_vectors_divide_rows_of_keys_and_values() -> None:
    rule = rule_of(SMALL | {"head_dim": 6, "value_dim": 2})
    inputs = rule.inputs(np.random.default_rng(0))
    assert error_of(result(rule, PARAMS, inputs, runnable(SSE)), rule.reference(*inputs)) <= rule.tolerance()


@pytest.mark.parametrize("params", [{"rows": 0}, {"tile_m": 9}, {"tile_n": 0}])
def test_none_where_parameters_do_not_fit(params: dict[str, Any]) -> None:
    assert template.apply(canonical.lower(rule_of(SMALL)), PARAMS | params, ARCH) is None
