"""GEMMs on wgmma compute what the rule does: every dtype, layout, odd size, epilogue and variant of the kernel, on a real GPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.gpu_kernels import Case, Checked, given, proposed
from support.wgmma_cases import EIGHT_TILES, FLOAT16, GEMMS, PLAIN, SMS, STREAM_K, STREAM_K_GEMMS

from kerneldecl.model import Value

pytestmark = pytest.mark.gpu

FIRST, SEVERAL = proposed("wgmma_matmul", step=20), proposed("wgmma_matmul", step=7)
"""One of 20 proposals, and three."""
LAYOUTS = ("nn", "nt", "tn", "tt")
DTYPES: dict[str, dict[str, Any]] = {
    "float16": {},
    "bfloat16": {"out_dtype": "float32"},
    "float8_e4m3fn": {"out_dtype": "float16"},
    "float8_e5m2": {"out_dtype": "bfloat16"},
    "int8": {},
    "float16 accumulators": {"dtype": "float16", "accum_dtype": "float16"},
    "tfloat32": {"dtype": "float32", "precision": "tfloat32"},
}
SIZES = {(512, 768, 640): FIRST, (301, 517, 333): SEVERAL, (5, 1030, 1096): FIRST, (1001, 24, 200): FIRST}
"""Whole tiles; nothing whole; few rows with a long k; few columns."""
VARIANTS: dict[str, dict[str, Value]] = {
    "cooperative": {"block_n": 128},
    "ping-pong": {"kernel_schedule": "pingpong", "block_n": 128, "stages": 4},
    "swapped": {"swap_ab": 1, "block_m": 64, "consumers": 1, "block_n": 32},
    "split-K": {"split_k": 4, "block_n": 128},
    "split-K by a workspace, cluster of rows": {"split_k": 3, "workspace": 1, "cluster_m": 2, "block_n": 128},
    "cluster of rows": {"cluster_m": 2, "block_n": 128},
    "cluster of columns, PDL": {"cluster_n": 2, "block_n": 96, "pdl": 1},
    "three consumers": {"consumers": 3, "block_m": 192, "block_n": 128},
    "two MMA tiles": {"block_m": 256, "block_n": 128},
}
EPILOGUES: list[dict[str, Any]] = [
    {"epilogue": ["bias", "relu"]},
    {"epilogue": ["bias", "gelu"], "dtype": "bfloat16"},
    {"epilogue": ["silu", "add"], "batch": 3},
    {"epilogue": ["bias", "hard_swish"]},
    {"epilogue": ["bias", "gelu_tanh"]},
    {"epilogue": ["scale_rows", "scale_columns", "bias"], "dtype": "int8", "out_dtype": "float16"},
    {"epilogue": ["scale", "add"], "dtype": "float8_e4m3fn", "out_dtype": "float32"},
]


def gemm(name: str, choice: Any, attrs: dict[str, Any], sms: int = 0) -> Case:
    return Case(name, "matmul", FLOAT16 | attrs, choice, sms)


def variant(name: str, attrs: dict[str, Any], params: dict[str, Value], sms: int = 0) -> Case:
    return gemm(name, given("wgmma_matmul", PLAIN | params), attrs, sms)


EMULATED = [variant(name, attrs, params, SMS) for name, (attrs, params) in GEMMS.items()]
WITH_STREAM_K = [variant(name, EIGHT_TILES | attrs, STREAM_K | params, sms) for name, (attrs, params, sms) in STREAM_K_GEMMS.items()]
PROPOSED = [
    gemm(f"{dtype}-{layout}-{m}x{n}x{k}", choice, {"dtype": dtype, **more, "layout": layout, "m": m, "n": n, "k": k})
    for (dtype, more), layout, ((m, n, k), choice) in itertools.product(DTYPES.items(), LAYOUTS, SIZES.items())
]
WITH_EPILOGUES = [
    variant(f"{'-'.join(attrs['epilogue'])}-{name}", {"m": 520, "n": 392, "k": 1024, **attrs}, params, SMS * 11)
    for attrs, (name, params) in itertools.product(EPILOGUES, VARIANTS.items())
]


@pytest.mark.parametrize("case", EMULATED, ids=str)
def test_what_is_right_on_the_emulated_gpu_is_right(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", WITH_STREAM_K, ids=str)
def test_stream_k(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", PROPOSED, ids=str)
def test_what_the_policy_proposes(case: Case, check: Checked) -> None:
    check(case)


@pytest.mark.parametrize("case", WITH_EPILOGUES, ids=str)
def test_epilogues_of_every_variant(case: Case, check: Checked) -> None:
    check(case)
