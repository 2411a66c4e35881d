"""Transposed convolutions on CPUs: right results of any stride, kernel and layout, in bounds; nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpus import AVX2, runnable
from support.guarded import touched_outside
from support.repository import REPOSITORY
from support.thinned import at
from support.unoptimised import unoptimised

from kerneldecl.arrays import Array, aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import cpu_conv2d_transpose as policy
from kerneldecl.templates import cpu_conv2d_transpose as template

ARCH = runnable(AVX2)
SMALL: dict[str, Any] = {"n": 2, "h": 7, "w": 9, "c": 5, "f": 21, "kh": 3, "kw": 4, "stride": 2, "padding": 1}
PARAMS = {"tile_w": 4, "vectors": 2, "block_h": 3, "panels": 1, "pack": False}


def rule_of(attrs: dict[str, Any]) -> Any:
    rule = load_rule(REPOSITORY, "conv2d_transpose").of(REPOSITORY, SMALL | attrs)
    assert list(rule.problems()) == []
    return rule


def built(rule: Any, params: dict[str, Any]) -> Any:
    mod = template.apply(canonical.lower(rule), params, ARCH)
    assert mod is not None
    return tvm.compile(mod, target=unoptimised(ARCH), tir_pipeline=PIPELINE)["main"]


def error(rule: Any, params: dict[str, Any]) -> float:
    inputs: list[Array] = rule.inputs(np.random.default_rng(0))
    out = aligned(poisoned(rule.signature().outputs[0]))
    built(rule, params)(*(tensor(aligned(array)) for array in inputs), tensor(out))
    return relative_error(out, rule.reference(*inputs))


@pytest.mark.parametrize(
    "attrs",
    at(
        {1, 3},
        [
            {"kh": 4, "kw": 4, "epilogue": ("bias", "relu")},
            {"extra": 1, "layout": "nchw", "epilogue": ("bias", "add")},
            {"kh": 2, "kw": 2, "padding": 0, "f": 16},  # no zeros around: X itself is read
            {"kh": 2, "kw": 3, "stride": 3, "padding": 0, "extra": 2},  # a phase without taps
            {"kh": 5, "stride": 1, "dtype": "float16", "epilogue": ("gelu",)},
            {"kh": 7, "stride": 4, "padding": 2, "layout": "nchw", "dtype": "bfloat16"},
            {"stride": 4, "padding": 2, "dtype": "int8"},
            {"dtype": "float64"},
            {"n": 1, "h": 1, "w": 1, "f": 1, "kh": 2, "stride": 1, "padding": 0},
        ],
    ),
    ids=lambda attrs: ",".join(f"{name}={value}" for name, value in attrs.items()),
)
def test_proposals_compute_the_reference(attrs: dict[str, Any]) -> None:
    rule = rule_of(attrs)
    proposals = policy.propose(iter_space(canonical.lower(rule)), ARCH, 1000)
    assert {dict(each.candidate.params)["pack"] for each in proposals} >= {True}
    for each in (proposals[0], proposals[-1]):
        assert error(rule, dict(each.candidate.params)) <= rule.tolerance(), each


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_stride_kernel_and_tile_are_right(data: st.DataObject) -> None:
    draw = lambda least, most: data.draw(st.integers(least, most))  # noqa: E731
    kh, kw, stride = draw(1, 5), draw(1, 5), draw(1, 4)
    sides = {"h": draw(1, 6), "w": draw(1, 9), "c": draw(1, 9), "f": draw(1, 40), "kh": kh, "kw": kw, "stride": stride}
    around = {"padding": draw(0, min(kh, kw) - 1), "extra": draw(0, stride - 1), "layout": data.draw(st.sampled_from(("nhwc", "nchw")))}
    attrs = SMALL | sides | around
    rule = load_rule(REPOSITORY, "conv2d_transpose").of(REPOSITORY, attrs)
    if list(rule.problems()):
        return
    params = {"tile_w": draw(1, 8), "vectors": draw(1, 3), "block_h": draw(1, 4), "panels": draw(1, 3), "pack": data.draw(st.booleans())}
    assert error(rule, params) <= rule.tolerance()


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("attrs", [{}, {"kh": 2, "kw": 2, "padding": 0}, {"layout": "nchw", "extra": 1}])
def test_nothing_outside_of_the_arguments_is_touched(attrs: dict[str, Any], at_end: bool) -> None:
    """Arguments lie beside pages that must not be read."""
    rule = rule_of(attrs)
    assert touched_outside(rule, built(rule, PARAMS), at_end=at_end) == ""


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("conv2d", {"n": 1, "h": 8, "w": 8, "c": 4, "f": 8, "kh": 3, "kw": 3}),
        ("conv3d", {"n": 1, "d": 4, "h": 5, "w": 6, "c": 4, "f": 8, "kd": 2, "kh": 3, "kw": 3}),
        ("matmul", {"m": 8, "n": 8, "k": 8}),
    ],
)
def test_other_computations_are_none(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))
    assert template.apply(mod, PARAMS, ARCH) is None
    assert policy.propose(iter_space(mod), ARCH, 5) == ()


@pytest.mark.parametrize("params", [{"tile_w": 0}, {"tile_w": 17}, {"vectors": 0}, {"vectors": 7}, {"block_h": 0}, {"panels": 0}])
def test_none_where_parameters_do_not_fit(params: dict[str, Any]) -> None:
    assert template.apply(canonical.lower(rule_of({})), PARAMS | params, ARCH) is None


def test_tiles_fit_the_registers_and_waste_few_columns() -> None:
    first, *rest = policy.propose(iter_space(canonical.lower(rule_of({"w": 16, "c": 64, "f": 64}))), ARCH, 100)
    for each in (first, *rest):
        params = dict(each.candidate.params)
        assert params["vectors"] * (params["tile_w"] + 1) + 1 <= ARCH.the_cpu.vector_registers
    tile_w = dict(first.candidate.params)["tile_w"]
    assert -(-16 // tile_w) * tile_w <= 18
