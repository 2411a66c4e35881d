"""Grouped GEMM on CPUs: right results of every form, dtype and size of groups, in bounds whatever the sizes are."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from support.cpus import AVX2, runnable
from support.repository import REPOSITORY
from support.thinned import every
from support.unoptimised import unoptimised

from kerneldecl.arrays import Array, aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import cpu_matmul_grouped as policy
from kerneldecl.runners.guard_pages import Guarded, GuardedArray
from kerneldecl.templates import cpu_matmul_grouped

ARCH = runnable(AVX2)
SMALL: dict[str, Any] = {"rows": 37, "groups": 5, "n": 75, "k": 45, "dtype": "float32"}
PARAMS = {"tile_m": 4, "vectors": 2}


def rule_of(attrs: dict[str, Any]) -> Any:
    rule = load_rule(REPOSITORY, "matmul_grouped").of(REPOSITORY, SMALL | attrs)
    assert list(rule.problems()) == []
    return rule


def built(attrs: dict[str, Any], params: dict[str, Any]) -> Any:
    mod = cpu_matmul_grouped.apply(canonical.lower(rule_of(attrs)), params, ARCH)
    assert mod is not None
    return tvm.compile(mod, target=unoptimised(ARCH), tir_pipeline=PIPELINE)["main"]


def error(kernel: Any, rule: Any, inputs: list[Array]) -> float:
    out = aligned(poisoned(rule.signature().outputs[0]))
    kernel(*(tensor(aligned(array)) for array in inputs), tensor(out))
    return relative_error(out, rule.reference(*inputs))


@pytest.mark.parametrize(
    ("masked", "layout", "dtype"), every(3, (False, True), ("nt", "nn"), ("float16", "bfloat16", "float32", "float8_e4m3fn"))
)
def test_right_results(masked: bool, layout: str, dtype: str) -> None:
    attrs = {"masked": masked, "layout": "nt" if dtype.startswith("float8") else layout, "dtype": dtype, "k": 261, "n": 133}
    rule = rule_of(attrs)
    for proposal in policy.propose(iter_space(canonical.lower(rule)), ARCH, 3)[::2]:
        kernel = built(attrs, dict(proposal.candidate.params))
        assert error(kernel, rule, rule.inputs(np.random.default_rng(0))) <= rule.tolerance(), proposal


@functools.cache
def plain_kernel() -> Any:
    return built({}, PARAMS)


@pytest.mark.slow
@given(st.lists(st.integers(0, 37), min_size=5, max_size=5))
def test_any_offsets_are_right(ends: list[int]) -> None:
    """Groups without rows, of one row and of all; rows of no group give zero, even where they hold NaN."""
    rule = rule_of({})
    a, b, _ = rule.inputs(np.random.default_rng(0))
    offsets = np.array(sorted(ends), np.int32)
    a[offsets[-1] :] = np.nan
    assert error(plain_kernel(), rule, [a, b, offsets]) <= rule.tolerance()


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("offsets", [(0, 0, 5, 37, 37), (37, 20, 10, 5, 0), (-5, 2**31 - 1, -(2**31), 38, 36)])
def test_nothing_outside_of_the_arguments_is_touched(offsets: tuple[int, ...], at_end: bool) -> None:
    """Whatever the offsets are; arguments lie beside pages that must not be read."""
    rule = rule_of({})
    a, b, _ = rule.inputs(np.random.default_rng(0))
    signature = rule.signature()
    arrays = [GuardedArray(arg, is_input=arg in signature.inputs) for arg in signature.args]
    placed = [array.placed(at_end=at_end) for array in arrays]
    for place, value in zip(placed, (a, b, np.array(offsets, np.int32)), strict=False):
        place[...] = value
    kernel, tensors = plain_kernel(), [tensor(place) for place in placed]
    assert Guarded(arrays).watched(lambda: kernel(*tensors)) == ""


@pytest.mark.parametrize(
    ("attrs", "sizes", "sentence"),
    [
        ({}, (1, 5, 4, 5, 9), "offsets decrease: 5, then 4 at group 2; each is where a group ends"),
        ({}, (1, 5, 6, 38, 38), "offsets[3] is 38; it must be 0 to 37, the rows that there are"),
        ({"masked": True}, (1, 0, -1, 3, 3), "counts[2] is -1; it must be 0 to 37, the rows that there are"),
    ],
)
def test_sizes_that_are_none_are_one_sentence(attrs: dict[str, Any], sizes: tuple[int, ...], sentence: str) -> None:
    rule = rule_of(attrs)
    *operands, _ = rule.inputs(np.random.default_rng(0))
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        rule.reference(*operands, np.array(sizes, np.int32))


@pytest.mark.parametrize("attrs", [{}, {"masked": True}, {"used": 1}, {"groups": 1}, {"groups": 2}, {"rows": 1}, {"groups": 60}])
def test_inputs_have_groups_of_every_kind(attrs: dict[str, Any]) -> None:
    rule = rule_of(attrs)
    for seed in range(5):
        *_, sizes = rule.inputs(np.random.default_rng(seed))
        rows = [part.stop - part.start for part in rule.rows_of_groups(sizes)]
        if not rule.masked:
            assert sum(rows) == (rule.used or rule.rows)
        if rule.groups > 2 and (rule.used or rule.rows) > 1:
            assert {0, 1} <= {*rows}


@pytest.mark.parametrize("params", [{"tile_m": 0}, {"tile_m": 17}, {"vectors": 0}, {"vectors": 9}])
def test_none_where_parameters_do_not_fit(params: dict[str, Any]) -> None:
    assert cpu_matmul_grouped.apply(canonical.lower(rule_of({})), PARAMS | params, ARCH) is None


@pytest.mark.parametrize(
    ("name", "attrs"), [("matmul", {"m": 8, "n": 8, "k": 8}), ("embedding", {"indices": (3,), "rows": 5, "columns": 4})]
)
def test_other_computations_are_none(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))
    assert cpu_matmul_grouped.apply(mod, PARAMS, ARCH) is None
    assert policy.propose(iter_space(mod), ARCH, 5) == ()


def test_proposals_fit_the_registers() -> None:
    space = iter_space(canonical.lower(rule_of({})))
    found = policy.propose(space, ARCH, 100)
    assert found
    for proposal in found:
        params = dict(proposal.candidate.params)
        assert params["vectors"] * (params["tile_m"] + 1) < ARCH.the_cpu.vector_registers


def test_policies_agree_on_what_comes_first() -> None:
    space = iter_space(canonical.lower(rule_of({})))
    assert [*itertools.islice(policy.propose(space, ARCH, 8), 3)] == [*policy.propose(space, ARCH, 3)]
