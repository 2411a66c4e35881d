"""Cumulative sums along other axes in one pass: right on the emulated GPU, no spills, and None for what it does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_scan as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_scan_columns as template

H200 = load_arch(REPOSITORY, "h200")
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({"shape": (2, 100, 40), "axis": 1}, {"threads": 64, "lanes": 8, "unroll": 2}),
    ({"shape": (70, 36), "axis": 0, "dtype": "float16", "exclusive": True}, {"threads": 32, "lanes": 4, "unroll": 4}),
    ({"shape": (3, 33, 8), "axis": 1, "dtype": "bfloat16", "reverse": True}, {"threads": 96, "lanes": 1, "unroll": 1}),
    ({"shape": (129, 7), "axis": 0, "dtype": "int64", "reverse": True, "exclusive": True}, {"threads": 64, "lanes": 16, "unroll": 1}),
    ({"shape": (50, 160), "axis": 0}, {"threads": 64, "lanes": 32, "unroll": 4}),
    ({"shape": (1, 65, 6), "axis": 1, "dtype": "float64"}, {"threads": 64, "lanes": 2, "unroll": 2}),
]
COLUMNS: dict[str, Any] = {"shape": (32, 4096, 256), "axis": 1}


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "cumsum").of(REPOSITORY, attrs)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({1, 3}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = rule_of(**attrs)
    kernel = template.apply(canonical.lower(rule), params, H200)
    assert kernel is not None
    inputs, (out,) = rule.inputs(np.random.default_rng(3)), rule.signature().outputs
    *_, got = emulate(kernel["main"], *inputs, poisoned(out))
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize("dtype", at({0}, ["float32", "bfloat16"]))
def test_few_columns_are_scanned_in_one_pass_without_spills(dtype: str, tmp_path: Path) -> None:
    mod = canonical.lower(rule_of(**COLUMNS, dtype=dtype))
    proposals = policy.propose(iter_space(mod), H200, 8)
    assert proposals[0].candidate.template == "gpu_scan_columns"
    assert {proposal.candidate.template for proposal in proposals} == {"gpu_scan", "gpu_scan_columns"}
    kernels = [
        template.apply(mod, dict(proposal.candidate.params), H200)
        for proposal in proposals
        if proposal.candidate.template == "gpu_scan_columns"
    ]
    assert all(kernels)
    launches = cuda.compile_cuda_object(kernels[0], H200, "kernel", LocalStore(tmp_path)).launches
    # A few registers of 64 may go for addresses; elements must not.
    assert all(launch.usage.spill_bytes <= 24 for launch in launches)


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"shape": (1000,)}, {"threads": 64, "lanes": 8, "unroll": 1}),
        (COLUMNS, {"threads": 48, "lanes": 8, "unroll": 1}),
        (COLUMNS, {"threads": 64, "lanes": 64, "unroll": 1}),
        (COLUMNS, {"threads": 64, "lanes": 6, "unroll": 1}),
        (COLUMNS, {"threads": 512, "lanes": 8, "unroll": 7}),
    ],
    ids=str,
)
def test_what_does_not_fit_is_none(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert template.apply(canonical.lower(rule_of(**attrs)), params, H200) is None
