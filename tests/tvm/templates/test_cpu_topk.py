"""Rows are sorted right on this CPU in each form: equal elements in their order, NaN the largest, rows of any length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from support.repository import REPOSITORY
from support.thinned import every

from kerneldecl.analysis.cpu_row_sort import FORMS, digit_shifts
from kerneldecl.arrays import Array, aligned, poisoned
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE, target_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import cpu_topk as policy
from kerneldecl.rule import Rule
from kerneldecl.templates import cpu_topk

HOST, LEVEL = load_arch(REPOSITORY, "host"), load_arch(REPOSITORY, "x86-64-v3")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
DTYPES = (*INTEGERS, "float16", "bfloat16", "float32", "float64")


def rule_of(name: str, **attrs: Any) -> Rule:
    rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    assert list(rule.problems()) == []
    return rule


def hostile(rule: Rule) -> Array:
    """Return rows with many equal elements, and with all that has an order of its own."""
    (arg,) = rule.signature().inputs
    random = np.random.default_rng(5)
    if arg.dtype in INTEGERS:
        limits = np.iinfo(arg.dtype)
        few = np.array([limits.min, limits.max, 0, 1, limits.max - 1, limits.min + 1, limits.max // 3])
    else:
        few = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0, 1e-7, -1e-7, 3.5])
    rows = random.choice(few, arg.shape)
    rest = rule.inputs(random)[0]
    return np.where(random.random(arg.shape) < 0.5, rows.astype(rest.dtype), rest)


def assert_equal(got: Array, want: Array) -> None:
    if got.dtype.name == "bfloat16":  # NumPy does not know its NaN
        got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(got, want)


def results(rule: Rule, form: str, x: Array, *, is_parallel: bool = True) -> list[Array] | None:
    mod = cpu_topk.apply(canonical.lower(rule), {"form": form, "parallel": is_parallel}, HOST)
    if mod is None:
        return None
    outs = [aligned(poisoned(arg)) for arg in rule.signature().outputs]
    tvm.compile(mod, target=target_of(HOST), tir_pipeline=PIPELINE)["main"](tensor(aligned(x)), *map(tensor, outs))
    return outs


@pytest.mark.parametrize(("dtype", "form"), every(5, DTYPES, FORMS))
def test_each_form_gives_what_the_reference_does(dtype: str, form: str) -> None:
    is_tried = False
    sorts = [rule_of("sort", shape=(3, extent), descending=bool(extent % 2), dtype=dtype) for extent in (1, 16, 77, 300, 1027)]
    for rule in (
        *sorts,
        rule_of("topk", shape=(2, 2, 500), k=100, dtype=dtype),
        *(rule_of("topk", shape=(3, 1003), k=k, dtype=dtype) for k in (1, 7)),
    ):
        x = hostile(rule)
        found = results(rule, form, x)
        is_tried |= found is not None
        for got, want in zip(found or (), rule.reference(x), strict=found is not None):
            assert_equal(got, want.astype(got.dtype))
    assert is_tried == (form == "insert" or (form == "merge") == (dtype in {"int64", "float64"}))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_sort_has_a_form(dtype: str) -> None:
    for extent in (1, 2, 100, 5000):
        proposals = policy.propose(iter_space(canonical.lower(rule_of("sort", shape=(2, extent), dtype=dtype))), LEVEL, 20)
        assert {dict(each.candidate.params)["parallel"] for each in proposals} == {True, False}


@pytest.mark.parametrize(
    ("rule", "form"),
    [
        (rule_of("sort", shape=(64, 32)), "count"),
        (rule_of("sort", shape=(64, 4096)), "radix"),
        (rule_of("topk", shape=(64, 4096), k=200), "select"),
        (rule_of("topk", shape=(64, 4096), k=2000), "radix"),
    ],
    ids=str,
)
def test_the_form_follows_from_the_sizes(rule: Rule, form: str) -> None:
    first, *_ = policy.propose(iter_space(canonical.lower(rule)), LEVEL, 1)
    assert dict(first.candidate.params)["form"] == form


def test_keys_of_narrow_dtypes_have_fewer_digits() -> None:
    """int16: two bytes, and the sign, which is a digit of its own where the key has 32 bits."""
    assert {dtype: len(digit_shifts(dtype)) for dtype in ("float32", "float16", "bfloat16", "int32", "int16", "uint8")} == {
        "float32": 4,
        "float16": 3,
        "bfloat16": 2,
        "int32": 4,
        "int16": 3,
        "uint8": 2,
    }
