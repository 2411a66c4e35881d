"""Cumulative sums in one pass: right on the emulated GPU, the same bits whichever block is first, and None for what it does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.emulated_kernel import error
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_scan as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_scan_once as template

H200 = load_arch(REPOSITORY, "h200")
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({"shape": (3, 3000), "dtype": "float16", "exclusive": True}, {"threads": 64, "unroll": 2}),
    ({"shape": (2, 17001), "exclusive": True}, {"threads": 32, "unroll": 2}),  # five groups of tiles in each row
    ({"shape": (2, 5001), "dtype": "int32", "reverse": True}, {"threads": 64, "unroll": 4}),
    ({"shape": (1, 40000), "dtype": "bfloat16", "reverse": True}, {"threads": 32, "unroll": 4}),
    ({"shape": (30000,), "exclusive": True, "reverse": True}, {"threads": 32, "unroll": 2}),
]


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "cumsum").of(REPOSITORY, attrs)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({0}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert error(template, rule_of(**attrs), params, H200) <= 1


@needs_nvcc
def test_whichever_thread_block_is_first_the_bits_are_the_same() -> None:
    rule = rule_of(shape=(20000,))
    kernel = template.apply(canonical.lower(rule), {"threads": 32, "unroll": 1}, H200)
    assert kernel is not None
    (x,), (out,) = rule.inputs(np.random.default_rng(0)), rule.signature().outputs
    found = [emulate(kernel["main"], x, poisoned(out), seed=seed)[-1] for seed in (1, 2, 3)]
    assert all((each == found[0]).all() for each in found)


@needs_nvcc
def test_long_rows_are_scanned_in_one_pass_too(tmp_path: Path) -> None:
    mod = canonical.lower(rule_of(shape=(1 << 25,)))
    proposals = [proposal.candidate for proposal in policy.propose(iter_space(mod), H200, 16)]
    assert {candidate.template for candidate in proposals} == {"gpu_scan", "gpu_scan_once", "gpu_scan_tiles"}
    once = next(candidate for candidate in proposals if candidate.template == "gpu_scan_once")
    kernel = template.apply(mod, dict(once.params), H200)
    launches = cuda.compile_cuda_object(kernel, H200, "kernel", LocalStore(tmp_path)).launches
    # A few registers of 64 may go for addresses; a tile's elements, 8 x 4 of a thread, must not.
    assert all(launch.usage.spill_bytes <= 16 for launch in launches)


@pytest.mark.parametrize("shape", [(8192, 4096), (64, 2048), (100000,)], ids=str)
def test_other_rows_are_not(shape: tuple[int, ...]) -> None:
    proposals = policy.propose(iter_space(canonical.lower(rule_of(shape=shape))), H200, 8)
    assert {proposal.candidate.template for proposal in proposals} == {"gpu_scan"}


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"shape": (1000,)}, {"threads": 1024, "unroll": 1}),
        ({"shape": (10000,)}, {"threads": 48, "unroll": 1}),
        ({"shape": (10000,)}, {"threads": 64, "unroll": 9}),
        ({"shape": (10000,), "dtype": "float64"}, {"threads": 64, "unroll": 1}),
        ({"shape": (1 << 23,)}, {"threads": 32, "unroll": 1}),
        ({"shape": (50, 1000), "axis": 0}, {"threads": 64, "unroll": 1}),
    ],
    ids=str,
)
def test_what_does_not_fit_is_none(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert template.apply(canonical.lower(rule_of(**attrs)), params, H200) is None
