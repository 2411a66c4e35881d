"""Comparisons and arithmetic of bools, which TVM's code generation refuses, compile for a CPU and compute what NumPy does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import te, tirx

from kerneldecl.compiler.cpu import PIPELINE

SHAPE = (4, 16)
CASES: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    "eq": (tirx.EQ, operator.eq),
    "ne": (tirx.NE, operator.ne),
    "lt": (tirx.LT, operator.lt),
    "ge": (tirx.GE, operator.ge),
    "add": (tirx.Add, np.logical_or),
    "mul": (tirx.Mul, np.logical_and),
    "max": (tirx.Max, np.maximum),
    "min": (tirx.Min, np.minimum),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_vector", [True, False])
def test_bools_are_operands(case: str, is_vector: bool) -> None:
    expression, reference = CASES[case]
    a, b = (te.placeholder(SHAPE, "bool", name) for name in "ab")
    schedule = tvm.s_tir.Schedule(te.create_prim_func([a, b, te.compute(SHAPE, lambda i, j: expression(a[i, j], b[i, j]), "out")]))
    if is_vector:
        schedule.vectorize(schedule.get_loops(schedule.get_sblock("out"))[-1])
    kernel = tvm.compile(schedule.mod, target="llvm", tir_pipeline=PIPELINE)["main"]
    rng = np.random.default_rng(1)
    x, y = (rng.integers(0, 2, SHAPE).astype(bool) for _ in range(2))
    out = tvm.runtime.tensor(np.zeros(SHAPE, bool))
    kernel(tvm.runtime.tensor(x), tvm.runtime.tensor(y), out)
    assert np.array_equal(out.numpy(), reference(x, y))
