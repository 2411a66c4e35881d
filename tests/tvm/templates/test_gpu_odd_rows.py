"""Reductions along rows of which a block's do not divide all: right on the emulated GPU, and few rows are proposed for no block."""

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
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Candidate, Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_gemv, gpu_reduce

H200 = load_arch(REPOSITORY, "h200")
POWERS = {"file": "tests/support/row_reductions.py", "function": "powers"}
Case = tuple[str, dict[str, Any], str, dict[str, Value]]


def sums(threads: int, rows: int, width: int, unroll: int, chunks: int = 1) -> dict[str, Value]:
    return {"strided": False, "threads": threads, "rows": rows, "width": width, "unroll": unroll, "chunks": chunks}


CASES: list[Case] = [
    ("reduce", {"op": "sum", "shape": (131, 32), "axes": (1,)}, "gpu_reduce", sums(8, 32, 4, 1)),
    ("reduce", {"op": "max", "shape": (61, 512), "axes": (1,), "dtype": "float16"}, "gpu_reduce", sums(64, 4, 4, 2)),
    ("reduce", {"op": "mean", "shape": (61, 300), "axes": (1,), "dtype": "float16"}, "gpu_reduce", sums(64, 4, 4, 2)),
    ("reduce", {"op": "sum", "shape": (61, 8192), "axes": (1,)}, "gpu_reduce", sums(64, 8, 4, 4, 4)),
    ("reduce", {"op": "mean", "shape": (6, 7, 11, 50), "axes": (1, 3), "dtype": "float16"}, "gpu_reduce", sums(16, 8, 2, 4, 5)),
    ("gemv", {"n": 61, "k": 512}, "gpu_gemv", sums(32, 4, 4, 2) | {"tile": 1}),
    ("gemv", {"n": 62, "k": 512}, "gpu_gemv", sums(32, 4, 4, 2) | {"tile": 2}),
    (
        "matmul",
        {"m": 1, "n": 61, "k": 512, "layout": "nt", "epilogue": ("bias", "relu"), "dtype": "float16"},
        "gpu_gemv",
        sums(8, 4, 8, 2) | {"tile": 1},
    ),
    ("matmul", {"batch": 3, "m": 1, "n": 41, "k": 64, "layout": "nt"}, "gpu_gemv", sums(8, 8, 4, 2) | {"tile": 1}),
    ("gemv_i4", {"n": 37, "k": 256, "dtype": "float32"}, "gpu_gemv", sums(8, 4, 8, 2) | {"tile": 1}),
    ("gemv_i4", {"n": 38, "k": 512, "dtype": "float16"}, "gpu_gemv", sums(32, 4, 8, 2) | {"tile": 2}),
    *(
        ("tensor_ir", POWERS, "gpu_rowwise", {"threads": threads, "rows": 4, "width": 4, "in_registers": is_kept})
        for threads, is_kept in [(8, True), (64, True), (8, False)]
    ),
    ("softmax", {"shape": (13, 64), "dtype": "float16"}, "gpu_rowwise", {"threads": 8, "rows": 4, "width": 8, "in_registers": True}),
]


@needs_nvcc
@pytest.mark.parametrize(("name", "attrs", "template", "params"), at({8, 11}, CASES))
def test_a_last_block_of_fewer_rows_computes_the_reference(
    name: str, attrs: dict[str, Any], template: str, params: dict[str, Value]
) -> None:
    """The emulator ends where a kernel reads or writes outside of its arguments."""
    rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    made = apply_candidate(REPOSITORY, canonical.lower(rule), Candidate.of(template, params), H200)
    assert made is not None
    inputs = rule.inputs(np.random.default_rng(0))
    (out,) = rule.signature().outputs
    *_, got = emulate(made.mod["main"], *inputs, poisoned(out))
    assert relative_error(got, np.asarray(rule.reference(*inputs)).reshape(got.shape)) <= rule.tolerance()


@pytest.mark.parametrize(
    ("policy", "name", "attrs", "secs"),
    [
        (gpu_reduce, "reduce", {"op": "sum", "shape": (161977, 67), "axes": (1,)}, 14e-6),
        (gpu_reduce, "reduce", {"op": "max", "shape": (81817, 24), "axes": (1,), "dtype": "float16"}, 3e-6),
        (gpu_gemv, "gemv", {"n": 29129, "k": 128}, 5e-6),
        (gpu_gemv, "gemv_i4", {"n": 6397, "k": 896}, 4e-6),
    ],
)
def test_prime_numbers_of_short_rows_fill_blocks(policy: Any, name: str, attrs: dict[str, Any], secs: float) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))
    first, *_ = policy.propose(iter_space(mod), H200, 20)
    params = dict(first.candidate.params)
    assert int(params["threads"]) * int(params["rows"]) >= 64
    assert first.predicted_secs < secs


def test_additions_test_no_bounds_of_rows() -> None:
    """nvcc would make branches of them that loads do not cross."""
    mod = canonical.lower(load_rule(REPOSITORY, "reduce").of(REPOSITORY, {"op": "sum", "shape": (131, 32), "axes": (1,)}))
    made = apply_candidate(REPOSITORY, mod, Candidate.of("gpu_reduce", sums(8, 32, 4, 1)), H200)
    assert made is not None
    guarded = [line for line in cuda_source(made.mod, H200, "kernel").splitlines() if line.startswith("  if (") and "< 131" in line]
    assert len(guarded) == 3  # of a load, of what a thread gives to the others, and of the result
