"""Products and convolutions on CUDA cores, run as serial programs: tiles that divide nothing, sizes of 1, batches, images."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import serial

from kerneldecl.arrays import relative_error
from kerneldecl.compiler import tensorir
from kerneldecl.compiler.space import iter_space
from kerneldecl.plugins import load_arch, load_rule
from kerneldecl.policies import gpu_matmul_simt as policy
from kerneldecl.templates import gpu_matmul_simt as template

ROOT = Path(__file__).parents[2]
H200 = load_arch(ROOT, "h200")

PRODUCTS = [
    *({"m": m, "n": n, "k": k, "batch": batch} for batch, m, n, k in itertools.product((1, 3), (1, 9), (1, 35), (1, 11))),
    {"m": 36, "n": 70, "k": 40, "layout": "nt", "precision": "tfloat32"},
    {"m": 20, "n": 36, "k": 40001, "layout": "nt", "epilogue": ("bias", "relu")},
    *({"m": m, "n": n, "k": k, "layout": layout} for m, n, k in [(33, 65, 40), (130, 7, 19)] for layout in ("nn", "nt", "tn", "tt")),
]
CONVOLUTIONS: list[dict[str, Any]] = [
    {"n": 2, "h": 9, "w": 11, "c": 3, "f": 5, "kh": 3, "kw": 3, "stride": 2, "padding": 1},
    {"n": 1, "h": 8, "w": 8, "c": 4, "f": 70, "kh": 1, "kw": 1},
    {"n": 3, "h": 8, "w": 7, "c": 6, "f": 8, "kh": 3, "kw": 2, "dilation": 2, "padding": 2, "epilogue": ("bias", "relu")},
    {"n": 1, "h": 1, "w": 1, "c": 1, "f": 1, "kh": 1, "kw": 1},
    {"n": 1, "h": 5, "w": 1, "c": 1, "f": 4, "kh": 3, "kw": 1},
]


@pytest.mark.parametrize(
    ("name", "attrs"),
    [*(("matmul", attrs) for attrs in PRODUCTS), *(("conv2d", attrs) for attrs in CONVOLUTIONS)],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_schedules_compute_the_reference_within_bounds(name: str, attrs: dict[str, Any]) -> None:
    rule = load_rule(ROOT, name).of(ROOT, attrs)
    mod = tensorir.lower(rule)
    inputs = rule.inputs(np.random.default_rng(0))
    want, (out,) = rule.reference(*inputs), rule.signature().outputs
    proposals = policy.propose(iter_space(mod), H200, 40, ())
    assert proposals
    for proposal in proposals[::13]:
        with serial.without_threads():
            schedule = template.apply(mod, dict(proposal.candidate.params), H200)
        assert schedule is not None, proposal
        assert relative_error(serial.run(schedule.mod, inputs, out), want) <= rule.tolerance(), proposal
