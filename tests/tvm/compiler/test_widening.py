"""A widened function reads where the function itself reads."""

from __future__ import annotations

import numpy as np
from tvm.script import tirx as T  # noqa: N812

from kerneldecl.compiler.reference import expected_outputs
from kerneldecl.signature import Arg


@T.prim_func(s_tir=True)
def scaled(x: T.Buffer((64,), "float32"), out: T.Buffer((20,), "float32")) -> None:
    for i in range(20):
        with T.sblock("out"):
            v = T.axis.spatial(20, i)
            out[v] = x[T.Cast("int32", T.ceil(T.Cast("float32", v) * T.float32(0.1)))] * T.float32(3.0)


def test_an_index_that_is_computed_in_float32_is_that_of_float32() -> None:
    x = np.arange(64, dtype="float32")
    steps = np.arange(20, dtype="float32") * np.float32(0.1)
    narrow, wide = np.ceil(steps).astype(int), np.ceil(np.arange(20) * np.float64(np.float32(0.1))).astype(int)
    assert (narrow != wide).any(), "else nothing is shown"
    (got,) = expected_outputs(scaled, [x], [Arg("out", (20,), "float32")])
    assert got.dtype == np.float64
    assert np.array_equal(got, x[narrow] * 3)
