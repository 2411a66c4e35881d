"""Reductions of few elements in vectors: proposed first, right on the emulated GPU; other reductions keep their proposals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY

from kerneldecl.analysis.short_reduction import MOST_ELEMENTS
from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value, dtype_bytes
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_reduce as policy
from kerneldecl.templates import gpu_elementwise as template

H200 = load_arch(REPOSITORY, "h200")
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({"op": "sum", "shape": (24, 1, 72), "axes": (1,), "dtype": "float16"}, {"threads": 128, "width": 8, "unroll": 2}),
    ({"op": "sum", "shape": (33, 1, 20), "axes": (1,)}, {"threads": 128, "width": 4, "unroll": 1}),
    ({"op": "mean", "shape": (7, 31, 1), "axes": (2,), "keepdims": True, "dtype": "bfloat16"}, {"threads": 128, "width": 1, "unroll": 4}),
    ({"op": "max", "shape": (1, 64, 1, 9), "axes": (0, 2), "dtype": "int8"}, {"threads": 256, "width": 8, "unroll": 1}),
]


def lowered(attrs: dict[str, Any]) -> Any:
    return canonical.lower(load_rule(REPOSITORY, "reduce").of(REPOSITORY, attrs))


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), CASES, ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = load_rule(REPOSITORY, "reduce").of(REPOSITORY, attrs)
    made = template.apply(canonical.lower(rule), params, H200)
    assert made is not None
    inputs = rule.inputs(np.random.default_rng(0))
    *_, got = emulate(made.mod["main"], *inputs, *map(poisoned, rule.signature().outputs))
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


def test_results_are_stored_in_vectors() -> None:
    made = template.apply(lowered({"op": "sum", "shape": (4096, 1, 512), "axes": (1,), "dtype": "float16"}), CASES[0][1], H200)
    assert made is not None
    stored = made.mod.script().partition('T.sblock("Y_local")')[0].rsplit("for ", 1)[1]
    assert "T.vectorized(T.int64(8))" in stored


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_vectors_come_first_and_threads_that_reduce_behind(dtype: str) -> None:
    space = iter_space(lowered({"op": "sum", "shape": (4096, 1, 512), "axes": (1,), "dtype": dtype}))
    names = [proposal.candidate.template for proposal in policy.propose(space, H200, 1000)]
    assert names[0] == "gpu_elementwise"
    assert names == sorted(names)
    assert set(names) == {"gpu_elementwise", "gpu_reduce"}


SHORT: list[tuple[str, dict[str, Any], dict[str, Value]]] = [
    ("reduce", {"op": "sum", "shape": (2, 1000), "axes": (0,), "dtype": "float16"}, {"threads": 32, "width": 8, "unroll": 2}),
    ("reduce", {"op": "mean", "shape": (3, 2, 68), "axes": (0, 1), "keepdims": True}, {"threads": 32, "width": 4, "unroll": 1}),
    ("reduce", {"op": "max", "shape": (5, 8, 24), "axes": (1,), "dtype": "bfloat16"}, {"threads": 32, "width": 8, "unroll": 1}),
    ("reduce", {"op": "max", "shape": (7, 80), "axes": (0,), "dtype": "int8"}, {"threads": 32, "width": 16, "unroll": 1}),
    ("reduce", {"op": "min", "shape": (4, 37), "axes": (0,), "dtype": "float64"}, {"threads": 32, "width": 1, "unroll": 1}),
    (
        "pool2d",
        {"op": "mean", "n": 2, "h": 5, "w": 5, "c": 16, "kh": 2, "kw": 2, "stride": 2, "padding": 1, "dtype": "float16"},
        {"threads": 32, "width": 8, "unroll": 1},
    ),
]
"""Reductions of few elements across contiguous memory, some of more results than whole blocks of threads have."""


@needs_nvcc
@pytest.mark.parametrize(("rule_name", "attrs", "params"), SHORT, ids=str)
def test_threads_hold_all_elements_of_short_reductions(rule_name: str, attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = load_rule(REPOSITORY, rule_name).of(REPOSITORY, attrs)
    made = template.apply(canonical.lower(rule), params, H200)
    assert made is not None
    assert f"T.vectorized(T.int64({params['width']}))" in made.mod.script() or params["width"] == 1
    inputs = rule.inputs(np.random.default_rng(0))
    *_, got = emulate(made.mod["main"], *inputs, *map(poisoned, rule.signature().outputs))
    assert relative_error(got, np.asarray(rule.reference(*inputs))) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "float64"])
def test_elements_of_the_longest_short_reduction_stay_in_registers(dtype: str) -> None:
    mod = lowered({"op": "sum", "shape": (MOST_ELEMENTS, 1 << 16), "axes": (0,), "dtype": dtype})
    made = template.apply(mod, {"threads": 256, "width": 16 // dtype_bytes(dtype), "unroll": 2}, H200)
    assert made is not None
    (usage,) = compiled_cubin(cuda_source(made.mod, H200, "kernel"), "sm_90a").usage.values()
    assert usage.stack_bytes == 0


@pytest.mark.parametrize("shape", [(2, 37_000_000), (4096, 2, 512), (3, MOST_ELEMENTS, 64)])
def test_short_reductions_are_tried_in_vectors_first_and_as_others_besides(shape: tuple[int, ...]) -> None:
    space = iter_space(lowered({"op": "sum", "shape": shape, "axes": (len(shape) - 2,), "dtype": "float16"}))
    names = [proposal.candidate.template for proposal in policy.propose(space, H200, 20)]
    assert names[0] == "gpu_elementwise"
    assert "gpu_reduce" in names


@pytest.mark.parametrize(("shape", "axis"), [((4096, MOST_ELEMENTS + 1, 512), 1), ((4096, 512), 1), ((512, 4096), 0)])
def test_long_reductions_are_no_copies(shape: tuple[int, ...], axis: int) -> None:
    mod = lowered({"op": "sum", "shape": shape, "axes": (axis,)})
    assert {proposal.candidate.template for proposal in policy.propose(iter_space(mod), H200, 1000)} == {"gpu_reduce"}
    assert template.apply(mod, CASES[1][1], H200) is None


def test_short_rows_are_reduced_by_threads_of_a_row() -> None:
    """Elements of a row are neighbours: a thread's results are not, in what it loads."""
    mod = lowered({"op": "sum", "shape": (4096, 4), "axes": (1,)})
    assert {proposal.candidate.template for proposal in policy.propose(iter_space(mod), H200, 1000)} == {"gpu_reduce"}
