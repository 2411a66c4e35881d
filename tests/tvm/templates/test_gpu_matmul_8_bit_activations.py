"""GEMMs of quantised weights with 8-bit activations: right on the emulated GPU, and never left to the schedules that fit every function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.model import Arch, Candidate, Value
from kerneldecl.plugins.load import load_arch, load_rule

A100, H200 = (load_arch(REPOSITORY, name) for name in ("a100-80gb", "h200"))
SIMT: dict[str, Value] = {"block_m": 16, "block_n": 32, "block_k": 8, "thread_m": 4, "thread_n": 4, "stages": 2, "raster_group": 1}


def right(rule: Any, candidate: Candidate, arch: Arch) -> None:
    made = apply_candidate(REPOSITORY, canonical.lower(rule), candidate, arch)
    assert made is not None
    inputs = rule.inputs(np.random.default_rng(0))
    [got] = emulate(made.mod["main"], *inputs, *map(poisoned, rule.signature().outputs))[len(inputs) :]
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize(("dtype", "zero_points"), [("int8", True), ("float8_e4m3fn", False)])
def test_packed_weights_are_unpacked_one_by_one_on_cuda_cores(dtype: str, zero_points: bool) -> None:
    attrs = {"m": 5, "n": 64, "k": 128, "layout": "packed", "dtype": dtype, "zero_points": zero_points}
    right(load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, attrs), Candidate.of("gpu_matmul_simt", {**SIMT, "split_k": 2}), A100)
