"""GEMMs and convolutions on CUDA cores, run as serial programs: tiles that divide nothing, sizes of 1, batches, images."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import serial_programs
from support.compilers import compiled_cubin, needs_nvcc, needs_nvdisasm, sass
from support.repository import REPOSITORY
from support.thinned import at, every, only

from kerneldecl.analysis.contraction import Contraction, contraction_of
from kerneldecl.analysis.params import ConvSimtParams, read_params
from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical, cpu
from kerneldecl.compiler.cuda import compile_cuda_object, cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.passes.dependent_launch import supports_pdl
from kerneldecl.model import Arch, Candidate, Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_matmul_simt as policy
from kerneldecl.policies.gpu import conv_tiles_simt
from kerneldecl.policies.gpu.conv_tiles import sliding_window_of
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_conv2d_simt, gpu_matmul_simt
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.scalarize_arrays import scalarized

ROOT = REPOSITORY
H200, T4 = load_arch(ROOT, "h200"), load_arch(ROOT, "t4")
TEMPLATES = {"gpu_matmul_simt": gpu_matmul_simt, "gpu_conv2d_simt": gpu_conv2d_simt}

MATMULS = [
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
    {"n": 2, "h": 10, "w": 9, "c": 4, "f": 36, "kh": 1, "kw": 5},
    {"n": 2, "h": 10, "w": 9, "c": 3, "f": 36, "kh": 5, "kw": 1},
    {"n": 1, "h": 19, "w": 18, "c": 3, "f": 36, "kh": 5, "kw": 5, "stride": 2, "padding": 2},
]


@pytest.mark.parametrize(
    ("name", "attrs"),
    every(5, [*(("matmul", attrs) for attrs in MATMULS), *(("conv2d", attrs) for attrs in CONVOLUTIONS)]),
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_schedules_compute_the_reference_within_bounds(name: str, attrs: dict[str, Any]) -> None:
    rule = load_rule(ROOT, name).of(ROOT, attrs)
    proposals = policy.propose(iter_space(canonical.lower(rule)), H200, 40)
    assert proposals
    for proposal in proposals[::13]:
        assert_right(rule, proposal.candidate, H200)


def assert_right(rule: Any, candidate: Candidate, arch: Arch) -> None:
    with serial_programs.without_threads():
        schedule = TEMPLATES[candidate.template].apply(canonical.lower(rule), dict(candidate.params), arch)
    assert schedule is not None, candidate
    inputs, (out,) = rule.inputs(np.random.default_rng(0)), rule.signature().outputs
    assert relative_error(serial_programs.run(schedule.mod, inputs, out), rule.reference(*inputs)) <= rule.tolerance(), candidate


@needs_nvcc
@pytest.mark.parametrize("layout", at({1}, ["nn", "tt"]))
def test_lanes_store_neighbouring_results_where_rows_are_no_whole_vectors(layout: str, tmp_path: Path) -> None:
    rule = load_rule(ROOT, "matmul").of(ROOT, {"m": 130, "n": 67, "k": 19, "layout": layout})
    found = [each.candidate for each in policy.propose(iter_space(canonical.lower(rule)), H200, 40)]
    candidate = next(each for each in found if dict(each.params).get("vector_n") == 1)
    assert_right(rule, candidate, H200)
    applied = cpu.apply_candidate(ROOT, canonical.lower(rule), candidate, H200)
    assert applied is not None
    launches = compile_cuda_object(applied.mod, H200, "kd_main", LocalStore(tmp_path)).launches
    assert not any(launch.usage.stack_bytes + launch.usage.spill_bytes for launch in launches)


@needs_nvcc
@pytest.mark.parametrize(
    ("layout", "m", "n", "params"),
    every(
        4,
        ["nn", "nt", "tn", "tt"],
        [
            (6, 203, {"block_m": 8, "block_n": 64, "thread_m": 2, "thread_n": 4}),
            (203, 7, {"block_m": 64, "block_n": 8, "thread_m": 8, "thread_n": 1, "vector_n": 1}),
            (203, 15, {"block_m": 64, "block_n": 16, "thread_m": 4, "thread_n": 2}),
            (30, 80, {"block_m": 16, "block_n": 32, "thread_m": 4, "thread_n": 4, "split_k": 37}),
        ],
    ),
)
def test_few_rows_or_columns_and_many_parts(layout: str, m: int, n: int, params: dict[str, Value], tmp_path: Path) -> None:
    rule = load_rule(ROOT, "matmul").of(ROOT, {"m": m, "n": n, "k": 893, "layout": layout})
    tile: dict[str, Value] = {"block_k": 8, "stages": 2, "raster_group": 1, "split_k": 3}
    candidate = Candidate.of("gpu_matmul_simt", tile | params)
    assert_right(rule, candidate, H200)
    applied = cpu.apply_candidate(ROOT, canonical.lower(rule), candidate, H200)
    assert applied is not None
    launches = compile_cuda_object(applied.mod, H200, "kd_main", LocalStore(tmp_path)).launches
    assert not any(launch.usage.stack_bytes + launch.usage.spill_bytes for launch in launches)


IMAGE: dict[str, Value] = {"rows": 2, "columns": 16, "row_tiles": 2, "block_n": 64, "thread_m": 8, "thread_n": 8}


@pytest.mark.parametrize(
    ("attrs", "params"),
    at(
        {0, 4},
        [
            ({"n": 1, "h": 30, "w": 35, "c": 3, "f": 70, "kh": 7, "kw": 7, "stride": 2, "padding": 3, "epilogue": ("bias", "relu")}, {}),
            ({"n": 2, "h": 9, "w": 11, "c": 3, "f": 5, "kh": 3, "kw": 3, "stride": 2, "padding": 1}, {"row_tiles": 1, "rows": 4}),
            ({"n": 3, "h": 8, "w": 7, "c": 6, "f": 8, "kh": 3, "kw": 2, "dilation": 2}, {"thread_n": 4, "block_n": 32}),
            ({"n": 1, "h": 12, "w": 20, "c": 4, "f": 40, "kh": 4, "kw": 4, "stride": 4}, {"thread_m": 4, "rows": 1}),
            ({"n": 2, "h": 12, "w": 20, "c": 3, "f": 40, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}, {}),
            ({"n": 2, "h": 12, "w": 20, "c": 8, "f": 40, "kh": 3, "kw": 3, "padding": 1, "dtype": "int8"}, {"thread_n": 4}),
            ({"n": 1, "h": 5, "w": 9, "c": 1, "f": 4, "kh": 3, "kw": 3}, {}),
        ],
    ),
)
@pytest.mark.parametrize("arch", [H200, T4], ids=["h200", "t4"])
def test_convolutions_from_the_image(attrs: dict[str, Any], params: dict[str, Value], arch: Arch) -> None:
    """Also where no copy can be asynchronous: on an older GPU, and of elements of less than 4 bytes."""
    rule = load_rule(ROOT, "conv2d").of(ROOT, attrs)
    assert_right(rule, Candidate.of("gpu_conv2d_simt", IMAGE | params), arch)


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("matmul", {"m": 64, "n": 64, "k": 64}),
        ("conv2d", {"n": 1, "h": 8, "w": 8, "c": 4, "f": 64, "kh": 3, "kw": 3, "groups": 2}),
        ("conv2d", {"n": 2, "h": 8, "w": 8, "c": 4, "f": 64, "kh": 3, "kw": 1}),
        ("conv2d", {"n": 2, "h": 8, "w": 8, "c": 4, "f": 64, "kh": 1, "kw": 3}),
        ("reduce", {"op": "sum", "shape": (64, 64), "axes": (1,)}),
    ],
)
def test_functions_without_an_image_have_no_such_schedule(name: str, attrs: dict[str, Any]) -> None:
    assert gpu_conv2d_simt.apply(canonical.lower(load_rule(ROOT, name).of(ROOT, attrs)), IMAGE, H200) is None


STEM: dict[str, Any] = {"n": 8, "h": 224, "w": 224, "c": 3, "f": 64, "kh": 7, "kw": 7, "stride": 2, "padding": 3}


@needs_nvcc
@pytest.mark.parametrize("name", only(("h200",), ["t4", "a100-80gb", "l4", "h200", "b200"]))
def test_an_image_in_shared_memory_compiles_without_spills(name: str, tmp_path: Path) -> None:
    arch = load_arch(ROOT, name)
    mod = canonical.lower(load_rule(ROOT, "conv2d").of(ROOT, STEM))
    proposals = policy.propose(iter_space(mod), arch, 20)
    first = next(proposal.candidate for proposal in proposals if proposal.candidate.template == "gpu_conv2d_simt")
    applied = cpu.apply_candidate(ROOT, mod, first, arch)
    assert applied is not None
    (launch,) = compile_cuda_object(applied.mod, arch, "kd_main", LocalStore(tmp_path)).launches
    assert launch.usage.stack_bytes + launch.usage.spill_bytes == 0
    space = iter_space(mod)
    gemm = contraction_of(space)
    assert isinstance(gemm, Contraction)
    window = sliding_window_of(space, gemm)
    assert window is not None
    predicted = conv_tiles_simt.smem_bytes(window, gemm, read_params(ConvSimtParams, dict(first.params)))
    # Where kernels overlap, they ask for as much as keeps more blocks off an SM than their share.
    assert supports_pdl(arch.the_gpu) or launch.dynamic_smem_bytes + launch.usage.smem_bytes <= predicted


@needs_nvcc
@needs_nvdisasm
def test_neighbours_in_a_row_are_loaded_once_and_together(tmp_path: Path) -> None:
    """Eight results of a row look at 63 neighbouring elements of it, 168 times: their loads are 16 of 16 bytes, or a few more of less."""
    mod = canonical.lower(load_rule(ROOT, "conv2d").of(ROOT, STEM))
    candidate = Candidate.of("gpu_conv2d_simt", IMAGE | {"rows": 8, "row_tiles": 1, "thread_n": 4})
    applied = cpu.apply_candidate(ROOT, mod, candidate, H200)
    assert applied is not None
    source = scalarized(cuda_source(applied.mod, H200, "kd_main"))
    code = sass(compiled_cubin(source, "sm_90", nvcc.FAST_MATH_FLAGS).content, tmp_path)
    places, of_weights = 7 * 3, 7 * 3
    assert len(re.findall(r"\bFFMA\b", code)) == places * 8 * 4
    assert len(re.findall(r"\bLDS\b", code)) - of_weights <= 32
