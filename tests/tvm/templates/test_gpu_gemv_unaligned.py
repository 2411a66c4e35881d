"""GEMVs of rows that are no whole vectors: right on the emulated GPU, beside NaN, None for other functions."""

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

from kerneldecl.analysis.unaligned_gemv import gemv_sizes_of
from kerneldecl.arrays import Array
from kerneldecl.compiler import canonical
from kerneldecl.compiler.gemv import read_gemv
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_gemv_unaligned as policy
from kerneldecl.rule import Rule
from kerneldecl.templates import gpu_gemv_unaligned as template

H200 = load_arch(REPOSITORY, "h200")
ALONG: dict[str, Value] = {"threads": 64, "lanes": 32, "tile": 2, "unroll": 2, "parts": 1}
ACROSS: dict[str, Value] = {"threads": 256, "lanes": 32, "tile": 1, "unroll": 4, "parts": 1}
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({"n": 37, "k": 301, "dtype": "float16"}, ALONG),
    ({"n": 19, "k": 1023, "dtype": "bfloat16"}, ALONG | {"lanes": 64, "unroll": 1}),
    ({"n": 33, "k": 97, "dtype": "float32"}, ALONG | {"lanes": 8, "tile": 1}),
    ({"n": 21, "k": 124, "dtype": "float16", "out_dtype": "float32"}, ALONG | {"lanes": 16, "tile": 4, "unroll": 1}),
    ({"n": 9, "k": 90, "dtype": "float16"}, ALONG | {"lanes": 4, "tile": 8, "unroll": 1}),
    ({"n": 301, "k": 37, "layout": "t", "dtype": "float16"}, ACROSS),
    ({"n": 251, "k": 95, "layout": "t", "dtype": "bfloat16"}, ACROSS | {"parts": 3}),
    ({"n": 127, "k": 70, "layout": "t", "dtype": "float32"}, ACROSS | {"threads": 128, "parts": 2, "unroll": 8}),
    ({"n": 500, "k": 41, "layout": "t", "dtype": "float16", "out_dtype": "float32"}, ACROSS | {"threads": 128, "parts": 2}),
    ({"n": 11, "k": 16, "layout": "t", "dtype": "float16"}, ACROSS | {"parts": 2}),
]


def rule_of(name: str = "gemv", **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name).of(REPOSITORY, attrs)


def emulated(rule: Rule, params: dict[str, Value], *given: Array) -> Array:
    kernel = template.apply(canonical.lower(rule), params, H200)
    assert kernel is not None
    want = rule.reference(*given)
    (out,) = rule.signature().outputs
    *same, got = emulate(kernel["main"], *given, np.full(want.shape, -7, given[0].dtype if out.dtype == "bfloat16" else out.dtype))
    assert all(np.array_equal(now, before, equal_nan=True) for now, before in zip(same, given, strict=True))
    return np.asarray(got)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({0, 6}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = rule_of(**attrs)
    given = rule.inputs(np.random.default_rng(0))
    got, want = emulated(rule, params, *given), rule.reference(*given)
    assert np.allclose(got.astype(np.float64), want, atol=rule.tolerance(), rtol=rule.tolerance())


@needs_nvcc
@pytest.mark.parametrize("layout", at({1}, ["n", "t"]))
def test_neighbouring_rows_and_columns_may_hold_what_is_no_number(layout: str) -> None:
    rule = rule_of(n=21, k=77, layout=layout, dtype="float16")
    w, x = rule.inputs(np.random.default_rng(0))
    rows = w if layout == "n" else w.T
    rows[[3, 11, 20]] = np.nan
    rows[7] = np.inf
    x[:] = abs(x) + np.float16(0.5)
    got, want = emulated(rule, ALONG if layout == "n" else ACROSS, w, x), rule.reference(w, x)
    assert np.allclose(got.astype(np.float64), want, atol=rule.tolerance() * 10, rtol=rule.tolerance() * 10, equal_nan=True)


@pytest.mark.parametrize("attrs", [{}, {"layout": "t"}, {"out_dtype": "float32"}], ids=str)
def test_what_the_rule_lowers_to_is_recognised(attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(n=33, k=77, dtype="float16", **attrs))
    sizes = read_gemv(mod)
    assert sizes is not None
    assert sizes == gemv_sizes_of(iter_space(mod))
    assert (sizes.n, sizes.k, sizes.is_across) == (33, 77, attrs.get("layout") == "t")


SHAPES = [{"n": 8193, "k": 4097}, {"n": 8691, "k": 1017, "layout": "t"}, {"n": 77, "k": 30001}, {"n": 30001, "k": 77}]


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("attrs", at({0, 1}, SHAPES), ids=str)
def test_candidates_apply_and_the_first_does_not_spill(attrs: dict[str, Any], tmp_path: Path) -> None:
    mod = canonical.lower(rule_of(dtype="bfloat16", **attrs))
    assert apply_without_spills(mod, template, policy, H200, 12, tmp_path) == {"gpu_gemv_unaligned", "gpu_gemv"}


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("gemv", {"n": 33, "k": 64, "dtype": "float16"}),
        ("gemv", {"n": 33, "k": 77, "dtype": "int8"}),
        ("matmul", {"m": 33, "n": 35, "k": 77, "dtype": "float16"}),
        ("reduce", {"op": "sum", "shape": (33, 77), "axes": (1,)}),
        ("softmax", {"shape": (33, 77)}),
    ],
    ids=str,
)
def test_other_functions_are_none_and_have_no_proposal(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(name, **attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, ALONG, H200) is None


@pytest.mark.parametrize("wrong", [{"threads": 33}, {"lanes": 24}, {"lanes": 128}, {"tile": 9}, {"unroll": 0}, {"parts": 2}], ids=str)
def test_parameters_that_do_not_fit_are_none(wrong: dict[str, Value]) -> None:
    mod = canonical.lower(rule_of(n=33, k=77, dtype="float16"))
    assert template.apply(mod, ALONG | wrong, H200) is None
