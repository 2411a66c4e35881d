"""Reductions down columns that threads do not divide: right on the emulated GPU, and threads that cover whole lines are proposed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_gemv as policy
from kerneldecl.policies import gpu_reduce as reduce_policy
from kerneldecl.templates import gpu_gemv, gpu_reduce

H200 = load_arch(REPOSITORY, "h200")
Case = tuple[str, dict[str, Any], Any, tuple[int, int, int, int, int]]
CASES: list[Case] = [
    ("gemv", {"n": 67, "k": 101, "layout": "t", "dtype": "bfloat16"}, gpu_gemv, (32, 8, 1, 4, 1)),
    ("gemv", {"n": 131, "k": 99, "layout": "t", "out_dtype": "float16"}, gpu_gemv, (32, 1, 1, 16, 3)),
    ("gemv", {"n": 134, "k": 99, "layout": "t", "dtype": "float16"}, gpu_gemv, (64, 4, 2, 4, 1)),
    ("matmul", {"m": 1, "n": 67, "k": 99, "dtype": "float16", "epilogue": ("bias", "gelu")}, gpu_gemv, (32, 2, 1, 8, 1)),
    ("matmul", {"m": 1, "n": 67, "k": 99, "batch": 3, "dtype": "float16", "epilogue": ("add",)}, gpu_gemv, (32, 16, 1, 16, 1)),
    ("reduce", {"op": "max", "shape": (5, 99, 67), "axes": (1,)}, gpu_reduce, (32, 8, 1, 4, 1)),
    ("reduce", {"op": "mean", "shape": (9, 11, 134), "axes": (0, 1), "dtype": "bfloat16"}, gpu_reduce, (64, 4, 2, 4, 1)),
    # Chunks that do not divide the rows, of columns that threads do not divide; the last one has a warp for each column in the end.
    ("reduce", {"op": "max", "shape": (99, 134), "axes": (0,)}, gpu_reduce, (32, 2, 2, 4, 5)),
    ("reduce", {"op": "sum", "shape": (5, 99, 268), "axes": (1,)}, gpu_reduce, (32, 4, 4, 4, 3)),
    ("matmul", {"m": 1, "n": 134, "k": 99, "batch": 3, "epilogue": ("add",)}, gpu_gemv, (32, 2, 2, 4, 5)),
    ("gemv", {"n": 128, "k": 101, "layout": "t", "dtype": "bfloat16"}, gpu_gemv, (32, 2, 2, 4, 5)),
    ("reduce", {"op": "mean", "shape": (1009, 3), "axes": (0,)}, gpu_reduce, (3, 1, 1, 4, 40)),
]


@needs_nvcc
@pytest.mark.parametrize(("name", "attrs", "template", "tiling"), at({4, 7}, CASES))
def test_right_results(name: str, attrs: dict[str, Any], template: Any, tiling: tuple[int, ...]) -> None:
    rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    params = {"strided": True, **dict(zip(("threads", "rows", "width", "unroll", "chunks"), tiling, strict=True))}
    made = template.apply(canonical.lower(rule), params, H200)
    assert made is not None
    inputs = rule.inputs(np.random.default_rng(0))
    [got] = emulate(made.mod["main"], *inputs, *map(poisoned, rule.signature().outputs))[len(inputs) :]
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


def test_a_prime_number_of_columns_has_threads_that_cover_whole_lines() -> None:
    """8691 is three times a prime: threads that divide it were three, and had three elements of a line of 64."""
    attrs = {"n": 8691, "k": 1017, "layout": "t", "dtype": "bfloat16"}
    mod = canonical.lower(load_rule(REPOSITORY, "gemv").of(REPOSITORY, attrs))
    first, *_ = policy.propose(iter_space(mod), H200, 20)
    params = dict(first.candidate.params)
    assert int(params["threads"]) >= 32
    assert int(params["unroll"]) >= 8
    assert gpu_gemv.apply(mod, params, H200) is not None
    assert first.predicted_secs < 1e-5


@pytest.mark.parametrize(("shape", "secs"), [((38791, 3), 5e-6), ((191, 27799), 10e-6), ((10007, 521), 13e-6), ((65006, 24), 8e-6)])
def test_primes_of_rows_or_columns_keep_every_sm_busy(shape: tuple[int, int], secs: float) -> None:
    """Chunks that divide 38791 rows are one, threads that divide 27799 columns are one."""
    mod = canonical.lower(load_rule(REPOSITORY, "reduce").of(REPOSITORY, {"op": "sum", "shape": shape, "axes": (0,)}))
    first, *_ = reduce_policy.propose(iter_space(mod), H200, 20)
    params = {name: int(value) for name, value in first.candidate.params}  # type: ignore[arg-type]
    columns = params["threads"] * params["width"]
    assert params["chunks"] * -(-shape[1] // columns) >= H200.the_gpu.sm_count // 2
    assert first.predicted_secs < secs
