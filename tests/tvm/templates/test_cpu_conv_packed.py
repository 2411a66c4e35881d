"""Convolutions that copy their operands on CPUs: right results of images and sequences, in bounds; nothing else is taken for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from support.cpus import AVX2, runnable
from support.guarded import touched_outside
from support.repository import REPOSITORY
from support.thinned import at
from support.unoptimised import unoptimised

from kerneldecl.arrays import aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import cpu_conv_packed as policy
from kerneldecl.templates import cpu_conv_packed as template

ARCH = runnable(AVX2)
IMAGE: dict[str, Any] = {"n": 2, "h": 8, "w": 9, "c": 5, "f": 21, "kh": 3, "kw": 3, "layout": "nchw"}
LAST: dict[str, Any] = IMAGE | {"layout": "nhwc"}
SEQUENCE: dict[str, Any] = {"n": 2, "w": 19, "c": 16, "f": 21, "kw": 3, "layout": "ncw"}
PARAMS = {"tile_w": 4, "vectors": 2, "block_h": 3, "panels": 1, "pack": True}


def rule_of(name: str, attrs: dict[str, Any]) -> Any:
    rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    assert list(rule.problems()) == []
    return rule


def built(rule: Any, params: dict[str, Any]) -> Any:
    mod = template.apply(canonical.lower(rule), params, ARCH)
    assert mod is not None
    return tvm.compile(mod, target=unoptimised(ARCH), tir_pipeline=PIPELINE)["main"]


@pytest.mark.parametrize(
    ("name", "attrs"),
    at(
        {1, 5},
        [
            ("conv2d", IMAGE | {"padding": 1, "epilogue": ("bias", "relu")}),
            ("conv2d", IMAGE | {"c": 6, "kw": 2, "strides": (2, 1), "dilations": (1, 2), "pads": (1, 0, 2, 1), "dtype": "float16"}),
            ("conv2d", IMAGE | {"n": 1, "kh": 1, "kw": 1, "c": 40, "dtype": "int8"}),
            ("conv1d", SEQUENCE | {"padding": 1, "epilogue": ("bias", "add")}),
            ("conv1d", SEQUENCE | {"n": 1, "w": 3, "stride": 2, "f": 3}),
            ("conv2d", LAST | {"padding": 1, "epilogue": ("bias", "relu")}),
            ("conv2d", LAST | {"c": 6, "kw": 2, "strides": (2, 1), "dilations": (1, 2), "pads": (1, 0, 2, 1), "dtype": "float16"}),
            ("conv2d", LAST | {"n": 1, "kh": 1, "kw": 1, "c": 40, "stride": 2}),
            ("conv1d", SEQUENCE | {"padding": 1, "layout": "nwc"}),
        ],
    ),
)
def test_proposals_compute_the_reference(name: str, attrs: dict[str, Any]) -> None:
    rule = rule_of(name, attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    proposals = policy.propose(iter_space(canonical.lower(rule)), ARCH, 1000)
    for each in {proposals[0], proposals[-1]}:
        out = aligned(poisoned(rule.signature().outputs[0]))
        built(rule, dict(each.candidate.params))(*(tensor(aligned(array)) for array in inputs), tensor(out))
        assert relative_error(out, rule.reference(*inputs)) <= rule.tolerance(), each


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize(("name", "attrs"), [("conv2d", IMAGE | {"pads": (1, 0, 2, 1)}), ("conv2d", LAST), ("conv1d", SEQUENCE)])
def test_nothing_outside_of_the_arguments_is_touched(name: str, attrs: dict[str, Any], at_end: bool) -> None:
    """Arguments lie beside pages that must not be read."""
    rule = rule_of(name, attrs)
    assert touched_outside(rule, built(rule, PARAMS), at_end=at_end) == ""


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("conv2d", LAST | {"c": 42, "f": 42, "groups": 2}),
        ("conv2d", IMAGE | {"c": 42, "f": 42, "groups": 2}),
        ("conv2d", IMAGE | {"c": 21, "groups": 21}),
        ("conv3d", {"n": 1, "d": 4, "h": 5, "w": 6, "c": 32, "f": 8, "kd": 2, "kh": 3, "kw": 3, "layout": "ncdhw"}),
        ("matmul", {"batch": 2, "m": 8, "n": 8, "k": 64}),
    ],
)
def test_other_computations_are_none(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(name, attrs))
    assert template.apply(mod, PARAMS, ARCH) is None
    assert policy.propose(iter_space(mod), ARCH, 5) == ()


def test_few_products_for_a_result_are_left_to_others() -> None:
    assert policy.propose(iter_space(canonical.lower(rule_of("conv2d", IMAGE | {"c": 1}))), ARCH, 5) == ()


def test_output_channels_last_of_whole_vectors_are_left_to_tiles_that_divide_them() -> None:
    assert policy.propose(iter_space(canonical.lower(rule_of("conv2d", LAST | {"f": 24}))), ARCH, 5) == ()
    assert policy.propose(iter_space(canonical.lower(rule_of("conv2d", LAST | {"f": 23, "c": 3}))), ARCH, 5) != ()
