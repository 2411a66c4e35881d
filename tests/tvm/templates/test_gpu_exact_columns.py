"""GEMMs on CUDA cores in tiles of all of few columns: right on the emulated GPU, and proposed where the usual tiles would waste many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.iter_spaces import H200, matmul
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import gpu_matmul_simt as policy
from kerneldecl.templates import gpu_matmul_simt

TILE = {"block_m": 32, "block_k": 8, "stages": 2, "thread_m": 8, "vector_n": 1, "raster_group": 1, "split_k": 1}
CASES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"n": 72, "k": 40, "layout": "tn", "batch": 2}, {"block_n": 72, "thread_n": 9, "stages": 4}),
    ({"n": 70, "k": 43, "layout": "nt", "epilogue": ("bias", "relu")}, {"block_m": 64, "block_n": 72, "thread_m": 4, "thread_n": 9}),
    ({"n": 40, "k": 43, "dtype": "float16"}, {"block_n": 40, "thread_n": 5}),
    ({"n": 80, "k": 64}, {"block_n": 80, "thread_n": 10, "thread_m": 4, "stages": 4, "vector_n": 4}),
    ({"n": 48, "k": 64, "layout": "tt"}, {"block_n": 48, "thread_n": 6, "stages": 4, "vector_n": 4}),
    ({"n": 72, "k": 512}, {"block_n": 72, "thread_n": 3, "split_k": 2}),
]


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({4}, CASES))
def test_right_results(attrs: dict[str, Any], params: dict[str, int]) -> None:
    rule = load_rule(REPOSITORY, "matmul").of(REPOSITORY, {"m": 70} | attrs)
    made = gpu_matmul_simt.apply(canonical.lower(rule), TILE | params, H200)
    assert made is not None
    inputs = rule.inputs(np.random.default_rng(0))
    [got] = emulate(made.mod["main"], *inputs, *map(poisoned, rule.signature().outputs))[len(inputs) :]
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


def test_72_columns_have_a_tile_of_their_own_first() -> None:
    """10 x 4395 x 72 x 1136 of float32: tiles of 32 columns took 283 us on an H200, torch 242 (2026-11-28)."""
    first, *_ = policy.propose(matmul((4395, 72, 1136), "tn", "float32", batch=10), H200, 20)
    assert dict(first.candidate.params)["block_n"] == 72


def test_columns_that_the_usual_tiles_hold_have_none() -> None:
    for columns in (32, 64, 96, 1000):
        proposals = policy.propose(matmul((4096, columns, 1024), "nn", "float32"), H200, 200)
        assert all(int(dict(one.candidate.params)["block_n"]) % 32 == 0 for one in proposals)
