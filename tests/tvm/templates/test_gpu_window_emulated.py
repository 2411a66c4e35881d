"""Reductions over sliding windows on GPUs as the CUDA that TVM writes of them, which schedules alone do not show: vectors, constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY
from support.thinned import every

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.model import Arch, Candidate
from kerneldecl.plugins.load import load_arch, load_rule

pytestmark = needs_nvcc

H200 = load_arch(REPOSITORY, "h200")
DEPTHWISE: dict[str, Any] = {"n": 2, "h": 8, "w": 8, "c": 64, "f": 64, "groups": 64, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}
POOL: dict[str, Any] = {"n": 2, "h": 8, "w": 8, "c": 64, "kh": 2, "kw": 2, "stride": 2}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "means of float16": ("pool2d", POOL | {"op": "mean", "dtype": "float16"}, 8),
    "means of bfloat16": ("pool2d", POOL | {"op": "mean", "dtype": "bfloat16"}, 8),
    "means of the pixels inside": (
        "pool2d",
        POOL | {"op": "mean", "dtype": "float16", "kh": 3, "kw": 3, "padding": 1, "count_padding": False},
        8,
    ),
    "means of uneven windows": (
        "adaptive_pool2d",
        {"op": "mean", "n": 2, "h": 7, "w": 7, "c": 64, "rows": 4, "columns": 4, "dtype": "float16"},
        8,
    ),
    "means of four channels": ("pool2d", POOL | {"op": "mean", "dtype": "float16"}, 4),
    "maxima": ("pool2d", POOL | {"op": "max", "dtype": "float16", "kh": 3, "kw": 3, "padding": 1}, 8),
    "a depthwise convolution": ("conv2d", DEPTHWISE | {"epilogue": ("bias", "relu")}, 8),
}
BYTES = DEPTHWISE | {"dtype": "float8_e5m2", "epilogue": ("bias",)}
OF_BYTES: dict[str, tuple[str, dict[str, Any], int]] = {
    "float8_e5m2 added up in float64": ("conv2d", BYTES | {"accum_dtype": "float64"}, 4),
    "wide vectors of float8_e5m2 added up in float64": ("conv2d", BYTES | {"accum_dtype": "float64", "epilogue": (), "padding": 0}, 16),
    "wide vectors of float8_e4m3fn": ("conv2d", BYTES | {"dtype": "float8_e4m3fn"}, 8),
    "wide vectors of integers": ("conv2d", BYTES | {"dtype": "int8"}, 16),
}
"""Vectors that CUDA's headers or TVM's CUDA do not have, of elements beyond the image and of results."""


@pytest.mark.parametrize("name", every(4, list(CASES)))
def test_vectors_of_channels_compute_the_reference(name: str) -> None:
    check(*CASES[name])


@pytest.mark.parametrize("name", OF_BYTES)
def test_vectors_of_bytes_compute_the_reference(name: str) -> None:
    check(*OF_BYTES[name])


@pytest.mark.parametrize("name", OF_BYTES)
def test_vectors_of_bytes_compile_for_gpus_without_float8(name: str) -> None:
    t4 = load_arch(REPOSITORY, "t4")
    source = cuda_source(scheduled(*OF_BYTES[name], t4)[1].mod, t4, "kernel")
    assert compiled_cubin(source, "sm_75").content


def scheduled(rule_name: str, attrs: dict[str, Any], width: int, arch: Arch = H200) -> tuple[Any, Any]:
    """Return a rule, and its schedule with vectors of so many channels."""
    rule = load_rule(REPOSITORY, rule_name).of(REPOSITORY, attrs)
    params = {"rows": 4, "threads": 64 // width, "width": width}
    schedule = apply_candidate(REPOSITORY, canonical.lower(rule), Candidate.of("gpu_window", params), arch)
    assert schedule is not None
    return rule, schedule


def check(rule_name: str, attrs: dict[str, Any], width: int) -> None:
    rule, schedule = scheduled(rule_name, attrs, width)
    inputs = rule.inputs(np.random.default_rng(0))
    (out,) = rule.signature().outputs
    *_, got = emulate(schedule.mod["main"], *inputs, poisoned(out))
    assert relative_error(got, np.asarray(rule.reference(*inputs))) <= rule.tolerance()
