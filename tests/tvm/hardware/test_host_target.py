"""What TVM compiles for this machine's CPU without a schedule of ours computes what it should."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import te, topi

from kerneldecl.compiler.cpu import target_of
from kerneldecl.hardware import host


@pytest.mark.skipif("avx512bw" not in Path("/proc/cpuinfo").read_text(), reason="LLVM stores by scatters with AVX-512 alone")
@pytest.mark.parametrize(("shape", "times"), [((3, 4, 5), (6, 4, 2)), ((2, 3, 4, 5), (7, 6, 4, 2))])
def test_wrapped_indices_are_vectorized_right(shape: tuple[int, ...], times: tuple[int, ...]) -> None:
    x = te.placeholder(shape, "float32", "x")
    kernel = tvm.compile(te.create_prim_func([x, topi.tile(x, times)]), target=target_of(host.detect()))
    array = np.random.default_rng(3).standard_normal(shape).astype("float32")
    out = tvm.runtime.tensor(np.zeros(np.multiply(shape, times), "float32"))
    kernel(tvm.runtime.tensor(array), out)
    assert np.array_equal(out.numpy(), np.tile(array, times))
