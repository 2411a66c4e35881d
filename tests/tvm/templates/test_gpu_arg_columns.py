"""Places of extreme elements along other axes: right on the emulated GPU, also of equals and NaN, None for what it does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.own_candidates import apply_without_spills
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_arg_reduce as policy
from kerneldecl.rule import Rule
from kerneldecl.templates import gpu_arg_columns as template

H200 = load_arch(REPOSITORY, "h200")
PARAMS: dict[str, Value] = {"threads": 64, "lanes": 64, "width": 8, "unroll": 2, "parts": 1}
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({"op": "argmax", "shape": (8, 1000), "axis": 0, "dtype": "bfloat16"}, {"unroll": 8}),
    ({"op": "argmin", "shape": (3, 50, 40), "axis": 1, "dtype": "float16", "index_dtype": "int32"}, {"lanes": 8, "width": 4}),
    ({"op": "argmax", "shape": (3001, 8), "axis": 0, "dtype": "bfloat16"}, {"lanes": 1, "parts": 3}),
    ({"op": "argmin", "shape": (5, 7, 3), "axis": 1, "dtype": "int8", "index_dtype": "int32"}, {"lanes": 16, "width": 1, "unroll": 3}),
    ({"op": "argmax", "shape": (2, 300, 3), "axis": 1}, {"threads": 96, "lanes": 3, "width": 1, "unroll": 4, "parts": 34}),
    ({"op": "argmin", "shape": (4, 9, 2, 24), "axis": 1, "dtype": "uint8"}, {"threads": 32, "lanes": 4, "unroll": 1, "parts": 2}),
    ({"op": "argmax", "shape": (65, 12), "axis": 0, "dtype": "int32"}, {"threads": 128, "lanes": 2, "width": 4, "unroll": 16}),
    ({"op": "argmin", "shape": (40, 64), "axis": 0, "dtype": "int16"}, {"lanes": 4, "unroll": 5}),
    ({"op": "argmax", "shape": (9, 1, 130), "axis": 0, "dtype": "int8"}, {"threads": 32, "lanes": 32, "width": 2, "parts": 9}),
    ({"op": "argmin", "shape": (1, 70, 4), "axis": 1}, {"lanes": 1, "width": 4, "unroll": 1}),
]
COLUMNS: list[tuple[tuple[int, ...], int]] = [((8, 494568), 0), ((64, 200, 3000), 1), ((494568, 8), 0), ((40000, 4, 3), 1)]


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "arg_reduce").of(REPOSITORY, attrs)


def emulated(rule: Rule, params: dict[str, Value], x: np.ndarray) -> np.ndarray:
    kernel = template.apply(canonical.lower(rule), PARAMS | params, H200)
    assert kernel is not None
    want = rule.reference(x)
    same, got = emulate(kernel["main"], x, np.full(want.shape, -7, want.dtype))
    assert np.array_equal(same, x, equal_nan=x.dtype.kind == "f")
    return np.asarray(got)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({1, 4}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = rule_of(**attrs)
    (x,) = rule.inputs(np.random.default_rng(0))
    assert (emulated(rule, params, x) == rule.reference(x)).all()


@needs_nvcc
@pytest.mark.parametrize("op", at({0}, ["argmax", "argmin"]))
@pytest.mark.parametrize("dtype", at({1}, ["float32", "float16"]))
def test_the_first_of_equals_is_taken_and_nan_comes_before_all(op: str, dtype: str) -> None:
    rule = rule_of(op=op, shape=(104, 12), axis=0, dtype=dtype)
    x = np.random.default_rng(0).standard_normal((104, 12)).astype(dtype)
    x[[5, 70], 0] = 9 if op == "argmax" else -9
    x[[90, 91, 40], 1] = np.nan
    x[:, 2] = -np.inf
    x[:, 3] = np.inf
    x[:, 4] = np.where(np.arange(104) % 2, 0.0, -0.0)
    x[[103, 3], 5] = [np.nan, np.inf]
    x[[0, 103], 6] = np.nan
    x[:, 7] = np.nan
    x[:, 8] = 1
    x[3:, 9] = x[2, 9]
    for lanes, parts in ((1, 1), (4, 1), (1, 2), (16, 11)):
        assert (emulated(rule, {"lanes": lanes, "width": 4, "parts": parts}, x) == rule.reference(x)).all()


@needs_nvcc
@pytest.mark.parametrize("dtype", at({0}, ["int8", "int32"]))
def test_the_first_of_equal_integers_is_taken_also_of_the_least(dtype: str) -> None:
    rule = rule_of(op="argmax", shape=(70, 4), axis=0, dtype=dtype)
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = np.full((70, 4), least, dtype)
    x[[69, 33], 1] = most
    x[69, 2] = least + 1
    assert (emulated(rule, {"lanes": 2, "width": 2, "parts": 3}, x) == rule.reference(x)).all()


@needs_nvcc
@pytest.mark.parametrize("dtype", at({0}, ["bfloat16", "int8", "float32"]))
@pytest.mark.parametrize(("shape", "axis"), at({2}, COLUMNS), ids=str)
def test_candidates_apply_and_the_first_does_not_spill(shape: tuple[int, ...], axis: int, dtype: str, tmp_path: Path) -> None:
    mod = canonical.lower(rule_of(op="argmax", shape=shape, axis=axis, dtype=dtype))
    assert apply_without_spills(mod, template, policy, H200, 8, tmp_path) == {"gpu_arg_columns"}


def test_few_columns_are_shared_by_thread_blocks_and_many_are_not() -> None:
    for shape, axis in COLUMNS:
        mod = canonical.lower(rule_of(op="argmin", shape=shape, axis=axis, dtype="bfloat16"))
        first = dict(policy.propose(iter_space(mod), H200, 1)[0].candidate.params)
        assert (first["parts"] > 1) == (shape == (494568, 8))


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 33},
        {"lanes": 24},
        {"width": 3},
        {"width": 16},
        {"unroll": 17},
        {"parts": 8},
        {"parts": 0},
        {"threads": 1024, "lanes": 1},
    ],
    ids=str,
)
def test_parameters_that_do_not_fit_are_none(wrong: dict[str, Value]) -> None:
    mod = canonical.lower(rule_of(op="argmax", shape=(3, 9, 64), axis=1, dtype="float16"))
    assert template.apply(mod, PARAMS | wrong, H200) is None


def test_rows_are_left_to_the_kernel_that_has_them() -> None:
    mod = canonical.lower(rule_of(op="argmax", shape=(3, 64), dtype="float16"))
    assert template.apply(mod, PARAMS, H200) is None
