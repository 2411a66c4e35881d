"""Cumulative sums of any length have kernels of n steps: n^2 steps of the fallback would never end, and are not proposed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.compilers import needs_nvcc
from support.repository import REPOSITORY

from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import cpu_scan, gpu_fallback, gpu_scan
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import cpu_scan as cpu_template
from kerneldecl.templates import gpu_scan as gpu_template

H200, HOST = load_arch(REPOSITORY, "h200"), load_arch(REPOSITORY, "host")
LONG: list[dict[str, Any]] = [
    {"shape": (1 << 31,)},
    {"shape": (3, 1 << 31), "dtype": "float16", "reverse": True},
    {"shape": (1 << 32, 2), "axis": 0, "dtype": "int64", "exclusive": True},
]
"""More elements than 32 bits count."""


def lowered(name: str, **attrs: Any) -> Any:
    return canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))


@needs_nvcc
@pytest.mark.parametrize("attrs", LONG, ids=str)
def test_sums_of_more_elements_than_32_bits_count_have_kernels(attrs: dict[str, Any], tmp_path: Path) -> None:
    mod = lowered("cumsum", **attrs)
    proposals = gpu_scan.propose(iter_space(mod), H200, 8)
    assert {proposal.candidate.template for proposal in proposals} == {"gpu_scan"}
    kernel = gpu_template.apply(mod, dict(proposals[0].candidate.params), H200)
    assert kernel is not None
    assert cuda.compile_cuda_object(kernel, H200, "kernel", LocalStore(tmp_path)).launches


@pytest.mark.parametrize("attrs", LONG, ids=str)
def test_so_they_have_on_a_cpu(attrs: dict[str, Any]) -> None:
    mod = lowered("cumsum", **attrs)
    first, *_ = cpu_scan.propose(iter_space(mod), HOST, 2)
    assert cpu_template.apply(mod, dict(first.candidate.params), HOST) is not None
    assert first.predicted_secs < 60


def test_the_fallback_proposes_no_kernel_that_would_take_minutes() -> None:
    assert not gpu_fallback.propose(iter_space(lowered("cumsum", shape=(1 << 26,))), H200, 10)
    short = gpu_fallback.propose(iter_space(lowered("cumsum", shape=(64, 4096))), H200, 10)
    assert len(short) == 10
    assert all(proposal.predicted_secs < 0.1 for proposal in short)
