"""Places of extreme elements of rows: right on the emulated GPU, also of equals and NaN, None and no proposal for other functions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.own_candidates import apply_without_spills
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.analysis.arg_reduce import arg_sizes_of
from kerneldecl.compiler import canonical
from kerneldecl.compiler.arg_reduce import read_arg_reduce
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_arg_reduce as policy
from kerneldecl.rule import Rule
from kerneldecl.templates import gpu_arg_reduce as template

H200 = load_arch(REPOSITORY, "h200")
PARAMS: dict[str, Value] = {"threads": 64, "width": 8, "unroll": 2, "parts": 1}
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({"op": "argmax", "shape": (3, 1000), "dtype": "float16"}, {}),
    ({"op": "argmin", "shape": (2, 3, 400), "dtype": "bfloat16", "index_dtype": "int32"}, {"threads": 32}),
    ({"op": "argmax", "shape": (5, 1001)}, {"width": 1, "unroll": 4}),
    ({"op": "argmin", "shape": (2, 4096)}, {"width": 4, "parts": 3}),
    ({"op": "argmax", "shape": (2, 512), "dtype": "int8"}, {"width": 16, "parts": 2, "threads": 32, "unroll": 1}),
    ({"op": "argmin", "shape": (2, 512), "dtype": "uint8"}, {"width": 16}),
    ({"op": "argmax", "shape": (2, 520), "dtype": "int32"}, {"width": 4, "parts": 33}),
    ({"op": "argmin", "shape": (1, 2, 300, 1), "axis": 2}, {"width": 4, "parts": 2}),
    ({"op": "argmax", "shape": (7, 1000), "dtype": "float16"}, {"threads": 32, "unroll": 4, "rows": 4}),  # the last block is not full
]


def rule_of(name: str = "arg_reduce", **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name).of(REPOSITORY, attrs)


def emulated(rule: Rule, params: dict[str, Value], x: np.ndarray) -> np.ndarray:
    kernel = template.apply(canonical.lower(rule), PARAMS | params, H200)
    assert kernel is not None
    want = rule.reference(x)
    same, got = emulate(kernel["main"], x, np.full(want.shape, -7, want.dtype))
    assert np.array_equal(same, x, equal_nan=x.dtype.kind == "f")
    return np.asarray(got)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({3, 8}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = rule_of(**attrs)
    (x,) = rule.inputs(np.random.default_rng(0))
    assert (emulated(rule, params, x) == rule.reference(x)).all()


@needs_nvcc
@pytest.mark.parametrize("op", at({0}, ["argmax", "argmin"]))
def test_the_first_of_equals_is_taken_and_nan_comes_before_all(op: str) -> None:
    rule = rule_of(op=op, shape=(6, 1040), dtype="float16")
    x = np.random.default_rng(0).standard_normal((6, 1040)).astype(np.float16)
    x[0, [5, 700]] = 9 if op == "argmax" else -9
    x[1, [900, 901, 40]] = np.nan
    x[2] = -np.inf
    x[3] = np.inf
    x[4] = np.where(np.arange(1040) % 2, np.float16(0.0), np.float16(-0.0))
    x[5, [1039, 3]] = [np.nan, np.inf]
    for params in ({"parts": 1}, {"parts": 2}, {"threads": 32, "rows": 2}):
        assert (emulated(rule, params, x) == rule.reference(x)).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_what_the_rule_lowers_to_is_recognised(axis: int) -> None:
    for op in ("argmax", "argmin"):
        mod = canonical.lower(rule_of(op=op, shape=(3, 5, 16), axis=axis))
        spec = read_arg_reduce(mod)
        assert spec is not None
        assert (spec.axis, spec.is_largest) == (axis, op == "argmax")
        assert (template.apply(mod, PARAMS | {"width": 4}, H200) is None) == (axis != 2)
        own = "gpu_arg_reduce" if axis == 2 else "gpu_arg_columns"
        assert own in {proposal.candidate.template for proposal in policy.propose(iter_space(mod), H200, 5)}


@pytest.mark.parametrize("shape", [(1, 1000), (3, 1, 1000), (2, 1000, 1)], ids=str)
def test_axes_of_one_element_change_nothing(shape: tuple[int, ...]) -> None:
    mod = canonical.lower(rule_of(op="argmax", shape=shape, axis=shape.index(1000), dtype="float16"))
    sizes = arg_sizes_of(iter_space(mod))
    assert sizes is not None
    assert sizes[:3] == (math.prod(shape) // 1000, 1000, 1)
    assert template.apply(mod, PARAMS, H200) is not None


@needs_nvcc
@pytest.mark.parametrize("shape", at({0}, [(each,) for each in [(2048, 32000), (64, 128256), (8192, 1000)]]), ids=str)
def test_candidates_apply_and_the_first_does_not_spill(shape: tuple[int, int], tmp_path: Path) -> None:
    mod = canonical.lower(rule_of(op="argmax", shape=shape, dtype="float16"))
    assert apply_without_spills(mod, template, policy, H200, 8, tmp_path) == {"gpu_arg_reduce", "gpu_rowwise"}


@pytest.mark.parametrize(
    ("name", "attrs"),
    [("softmax", {"shape": (33, 64)}), ("reduce", {"op": "max", "shape": (33, 64), "axes": (1,)}), ("layer_norm", {"shape": (33, 64)})],
    ids=str,
)
def test_other_functions_are_none_and_have_no_proposal(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(name, **attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, PARAMS, H200) is None


@pytest.mark.parametrize(
    "wrong",
    [{"threads": 33}, {"width": 16}, {"width": 3}, {"unroll": 9}, {"parts": 126}, {"parts": 0}, {"threads": 2048}, {"rows": 2}],
    ids=str,
)
def test_parameters_that_do_not_fit_are_none(wrong: dict[str, Value]) -> None:
    mod = canonical.lower(rule_of(op="argmax", shape=(3, 1000), dtype="float16"))
    assert template.apply(mod, PARAMS | wrong, H200) is None
