"""Reductions of one element are copies: vectors are proposed first, right on the emulated GPU; other reductions keep their proposals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
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


@pytest.mark.parametrize("shape", [(4096, 2, 512), (4096, 512)])
def test_reductions_of_several_elements_are_no_copies(shape: tuple[int, ...]) -> None:
    mod = lowered({"op": "sum", "shape": shape, "axes": (1,)})
    assert {proposal.candidate.template for proposal in policy.propose(iter_space(mod), H200, 1000)} == {"gpu_reduce"}
    assert template.apply(mod, CASES[1][1], H200) is None
