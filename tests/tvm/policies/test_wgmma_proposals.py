"""What the policies for wgmma propose can be built: the templates take every candidate, and the first ones spill no registers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at, only

from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import compile_cuda_object, cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_module, load_rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.read_gemm import read_gemm
from kerneldecl.templates.wgmma_matmul import kernel_of

ROOT = REPOSITORY
ARCH = load_arch(ROOT, "h200")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "small": ("matmul", {"m": 1024, "n": 1024, "k": 1024, "layout": "nn", "dtype": "float16"}),
    "large_bfloat16": ("matmul", {"m": 4096, "n": 4096, "k": 4096, "layout": "tt", "dtype": "bfloat16"}),
    "one_row": ("matmul", {"m": 1, "n": 4096, "k": 4096, "layout": "nt", "dtype": "float16"}),
    "long_k": ("matmul", {"m": 128, "n": 512, "k": 16384, "layout": "nt", "dtype": "float16"}),
    "few_tiles_long_rows": ("matmul", {"m": 556, "n": 464, "k": 9240, "layout": "nn", "dtype": "float16"}),
    "few_tiles_odd_k_tiles": (
        "matmul",
        {"m": 17, "n": 272, "k": 9232, "layout": "nt", "dtype": "float8_e4m3fn", "out_dtype": "float16"},
    ),
    "few_rows": ("matmul", {"m": 20, "n": 4096, "k": 11008, "layout": "nt", "dtype": "float16", "epilogue": ("bias", "silu")}),
    "rows_of_any_length": ("matmul", {"m": 1001, "n": 1003, "k": 517, "layout": "nt", "dtype": "float16"}),
    "batch": ("matmul", {"batch": 3, "m": 200, "n": 3000, "k": 1024, "layout": "tn", "dtype": "bfloat16"}),
    "int8_scaled": (
        "matmul",
        {
            "m": 512,
            "n": 400,
            "k": 512,
            "layout": "nt",
            "dtype": "int8",
            "out_dtype": "float16",
            "epilogue": ("scale_rows", "scale_columns"),
        },
    ),
    "float8": ("matmul", {"m": 2000, "n": 2008, "k": 1024, "layout": "nt", "dtype": "float8_e4m3fn", "out_dtype": "float16"}),
    "float16_accumulators": ("matmul", {"m": 2000, "n": 2048, "k": 4096, "layout": "nn", "dtype": "float16", "accum_dtype": "float16"}),
    "tfloat32": ("matmul", {"m": 2000, "n": 2048, "k": 1024, "layout": "nt", "precision": "tfloat32"}),
    "tfloat32_nn": ("matmul", {"m": 2000, "n": 2048, "k": 1024, "layout": "nn", "precision": "tfloat32"}),
    "pixels": ("conv2d", {"n": 8, "h": 28, "w": 28, "c": 128, "f": 256, "kh": 1, "kw": 1, "dtype": "float16"}),
}


@pytest.mark.parametrize(
    ("rule", "policy", "attrs"),
    at(
        {1},
        [
            ("matmul", "wgmma_matmul", {"m": 4096, "n": 4096, "k": 1024, "layout": "nt", "dtype": "float16"}),
            ("matmul", "wgmma_matmul", {"m": 20, "n": 4096, "k": 1024, "layout": "nt", "dtype": "bfloat16"}),
            ("conv2d", "wgmma_conv2d", {"n": 2, "h": 64, "w": 64, "c": 320, "f": 320, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}),
        ],
    ),
)
def test_the_first_proposals_have_room_for_a_residuals_tile(rule: str, policy: str, attrs: dict[str, Any]) -> None:
    """The time model and the template agree on whether TMA loads it."""
    mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, {**attrs, "epilogue": ("bias", "add")}))
    proposals = load_module("policies", ROOT, policy).propose(iter_space(mod), ARCH, 3)
    template = load_module("templates", ROOT, policy)
    sources = [cuda_source(template.apply(mod, dict(proposal.candidate.params), ARCH), ARCH, "kd_main") for proposal in proposals]
    assert "ldmatrix" in sources[0]
    assert sum("ldmatrix" in source for source in sources) >= 2


@pytest.mark.parametrize("name", only(("pixels",), CASES))
def test_the_template_takes_every_candidate(name: str) -> None:
    rule, attrs = CASES[name]
    mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))
    proposals = load_module("policies", ROOT, "wgmma_matmul").propose(iter_space(mod), ARCH, 60)
    assert len(proposals) > 20
    for proposal in proposals[::7]:
        assert apply_candidate(ROOT, mod, proposal.candidate, ARCH) is not None, proposal


@pytest.mark.parametrize("dtype", at({0}, ["float16", "int8"]))
@pytest.mark.parametrize("layout", at({1, 2}, ["nn", "nt", "tn", "tt"]))
@pytest.mark.parametrize(
    "size", at({0, 3}, [(each,) for each in [(64, 6144, 4096), (512, 11008, 4096), (1024, 1024, 1024), (1016, 3000, 2048)]]), ids=str
)
def test_every_candidate_builds_a_kernel(size: tuple[int, int, int], layout: str, dtype: str) -> None:
    m, n, k = size
    mod = canonical.lower(load_rule(ROOT, "matmul").of(ROOT, {"m": m, "n": n, "k": k, "layout": layout, "dtype": dtype}))
    read = read_gemm(mod)
    assert read is not None
    proposals = load_module("policies", ROOT, "wgmma_matmul").propose(iter_space(mod), ARCH, 1000)
    assert proposals
    for proposal in proposals:
        params = dict(proposal.candidate.params)
        assert kernel_of(read, GemmParams.of(params), bool(params["pack"]), ARCH) is not None, proposal


@needs_nvcc
@pytest.mark.parametrize(
    "name",
    only(
        ("few_rows", "tfloat32_nn"),
        ["small", "few_rows", "rows_of_any_length", "int8_scaled", "float16_accumulators", "tfloat32", "tfloat32_nn"],
    ),
)
def test_the_first_choice_spills_nothing(name: str, tmp_path: Path) -> None:
    rule, attrs = CASES[name]
    mod = canonical.lower(load_rule(ROOT, rule).of(ROOT, attrs))
    (first,) = load_module("policies", ROOT, "wgmma_matmul").propose(iter_space(mod), ARCH, 1)
    applied = apply_candidate(ROOT, mod, first.candidate, ARCH)
    assert applied is not None
    for launch in compile_cuda_object(applied.mod, ARCH, "kernel", LocalStore(tmp_path)).launches:
        assert launch.usage.spill_bytes == 0
        assert launch.dynamic_smem_bytes + launch.usage.smem_bytes <= ARCH.the_gpu.smem_per_block_optin_bytes


@needs_nvcc
@pytest.mark.parametrize(
    "attrs",
    at(
        {0},
        [
            {"m": 40, "n": 136, "k": 256, "dtype": "int8", "out_dtype": "float16", "epilogue": ("scale_rows", "scale_columns", "bias")},
            {"m": 130, "n": 72, "k": 128, "dtype": "int8", "out_dtype": "bfloat16", "epilogue": ("scale", "gelu")},
            {"m": 130, "n": 72, "k": 192, "dtype": "float8_e5m2", "out_dtype": "float16", "epilogue": ("scale_rows", "add")},
        ],
    ),
    ids=lambda attrs: "_".join((attrs["dtype"], *attrs["epilogue"])),
)
def test_the_first_choice_scales_as_the_rule_does(attrs: dict[str, Any]) -> None:
    rule = load_rule(ROOT, "matmul").of(ROOT, {**attrs, "layout": "nt"})
    mod = canonical.lower(rule)
    (first,) = load_module("policies", ROOT, "wgmma_matmul").propose(iter_space(mod), ARCH, 1)
    applied = apply_candidate(ROOT, mod, first.candidate, ARCH)
    assert applied is not None
    inputs = rule.inputs(np.random.default_rng(7))
    *_, got = emulate(applied.mod["main"], *inputs, poisoned(rule.signature().outputs[0]))
    assert relative_error(np.asarray(got), np.asarray(rule.reference(*inputs))) <= rule.tolerance()
