"""Kernels of any number of rows: what templates make of several sizes is one function, which is the static one at every other size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from emulation import emulate
from support.compilers import needs_nvcc
from support.thinned import only
from tvm.sym import Analyzer
from tvm_ffi import structural

from kerneldecl.arrays import poisoned
from kerneldecl.compiler import canonical, cpu, cuda
from kerneldecl.compiler.rows import MANY_SMS, ONE_ROW, Formula, for_any_rows, solved, unit_of, unlimited_archs, with_upto
from kerneldecl.hardware.host import detect
from kerneldecl.model import Candidate
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.rows import Rows
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore

HOST = detect()
H200 = load_arch(STANDARD, "h200")
GEMM = {"n": 96, "k": 64, "layout": "nt"}
TILES = {"tile_n": 32, "block_n": 96, "block_k": 0, "order": "mn", "pack_m": True, "pack_n": True}
HOPPER = {"cluster_m": 1, "cluster_n": 1, "consumers": 1, "kernel_schedule": "cooperative", "pack": 0, "pdl": 1, "raster_group": 1}


ATTENTION = {"batch": 1, "heads": 4, "kv_heads": 2, "keys": 96, "head_dim": 32, "dtype": "float32"}
GROUPED = {"groups": 3, "n": 64, "k": 64, "dtype": "float32"}
QUANTIZED = {"n": 64, "k": 128, "dtype": "float16"}
ROWS = {"matmul_grouped": "rows", "attention": "queries"}
"""The attribute that is a number of rows, where it is not m."""


def rule_of(name: str, attrs: Mapping[str, Any], rows: int) -> Rule:
    given = {"shape": (rows, *attrs["shape"][1:])} if "shape" in attrs else {ROWS.get(name, "m"): rows}
    return load_rule(STANDARD, name).of(STANDARD, {**attrs, **given})


def applied(name: str, attrs: Mapping[str, Any], candidate: Candidate, arch: Any) -> Callable[[int], tvm.IRModule | None]:
    def apply(rows: int) -> tvm.IRModule | None:
        found = cpu.apply_candidate(STANDARD, canonical.lower(rule_of(name, attrs, rows)), candidate, arch)
        return None if found is None else found.mod

    return apply


def general(name: str, attrs: Mapping[str, Any], candidate: Candidate, arch: Any, tuned: int = 16) -> tvm.IRModule:
    found = for_any_rows(applied(name, attrs, candidate, arch), tuned, unit_of(dict(candidate.params)))
    assert found is not None
    return with_upto(found, 1000)


def at(mod: tvm.IRModule, rows: int) -> Any:
    """Return the function of a number of rows."""
    (var,) = {extent for param in mod["main"].params for extent in param.shape if isinstance(extent, tvm.ir.Var)}
    number = tvm.tirx.IntImm(var.ty.dtype, rows)
    folded = (tvm.tirx.Add, tvm.tirx.Mul, tvm.tirx.FloorDiv, tvm.tirx.Cast)
    placed = [(tvm.ir.Var, lambda other: number if other.same_as(var) else other), (folded, Analyzer().simplify)]
    func = structural.structural_map(mod["main"], placed, order="post")
    return tvm.tirx.PrimFunc(func.params, func.body, func.ret_type, func.attrs)


@pytest.mark.parametrize(
    ("rule", "attrs", "candidate"),
    only(
        ("matmul", "attention", "softmax"),
        [
            ("matmul", {**GEMM, "epilogue": ("bias", "relu")}, Candidate.of("cpu_matmul", {**TILES, "tile_m": 8, "block_m": 32})),
            ("matmul", {**GEMM, "layout": "nn"}, Candidate.of("cpu_matmul", {**TILES, "tile_m": 14, "block_m": 14})),
            ("matmul", GEMM, Candidate.of("cpu_dot", {"tile_m": 4, "tile_n": 4, "block_m": 8, "block_n": 96, "order": "nm"})),
            (
                "matmul_quantized",
                QUANTIZED,
                Candidate.of("cpu_matmul", {**TILES, "block_n": 64, "tile_m": 4, "block_m": 8, "pack_m": False}),
            ),
            ("matmul_grouped", GROUPED, Candidate.of("cpu_matmul_grouped", {"tile_m": 8, "vectors": 2})),
            ("attention", ATTENTION, Candidate.of("cpu_attention", {"block_m": 32, "block_n": 64, "pack": True, "tile_e": 8, "tile_n": 8})),
            ("softmax", {"shape": (0, 100)}, Candidate.of("cpu_rowwise", {"vectors": 2, "parallel": True})),
            ("layer_norm", {"shape": (0, 64)}, Candidate.of("cpu_rowwise", {"vectors": 1, "parallel": False})),
            ("reduce", {"shape": (0, 77), "op": "sum", "axes": (-1,)}, Candidate.of("cpu_fallback", {"parallel": True, "vectorize": True})),
        ],
    ),
    ids=str,
)
def test_a_cpu_kernel_of_any_rows_is_right_at_every_number(rule: str, attrs: dict[str, Any], candidate: Candidate, tmp_path: Path) -> None:
    from kerneldecl.artifact.kernels import kernel_of, load_library
    from kerneldecl.toolchain.cxx import link_shared_library

    (tmp_path / "kernel.o").write_bytes(cpu.compile_object(general(rule, attrs, candidate, HOST), HOST, "kd_rows"))
    link_shared_library(tmp_path / "kernel.so", [tmp_path / "kernel.o"])
    kernel = kernel_of(load_library(tmp_path / "kernel.so"), "kd_rows")
    for rows in (1, 2, 7, 8, 14, 15, 32, 63, 65, 500, 1000):
        given = rule_of(rule, attrs, rows)
        inputs = given.inputs(np.random.default_rng(rows))
        out = poisoned(given.signature().outputs[0])
        kernel(*inputs, out)
        np.testing.assert_allclose(out, given.reference(*inputs), rtol=1e-3, atol=1e-3, err_msg=f"{rows} rows")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"swap_ab": 1, "block_n": 16},
        {"swap_ab": 0, "block_n": 32, "raster_group": 2},
        {"swap_ab": 1, "block_n": 24, "cluster_n": 2},
        {"swap_ab": 1, "block_n": 24, "split_k": 2},
        {"swap_ab": 1, "block_n": 16, "cluster_m": 2},
        {"swap_ab": 0, "block_n": 24, "cluster_n": 2},
    ],
    ids=str,
)
def test_a_hopper_kernel_of_any_rows_is_right_at_numbers_that_it_was_not_made_of(params: dict[str, int]) -> None:
    attrs = {**GEMM, "k": 192, "dtype": "float16", "epilogue": ("bias",)}
    fixed = {**HOPPER, "block_m": 64, "split_k": 1, "stages": 2, "stream_k": 0}
    candidate = Candidate.of("wgmma_matmul", {**fixed, **params})
    made = general("matmul", attrs, candidate, load_arch(STANDARD, "h200"), tuned=100)
    for rows in (1, 24, 96, 129):
        given = rule_of("matmul", attrs, rows)
        inputs = given.inputs(np.random.default_rng(rows))
        *_, out = emulate(at(made, rows), *inputs, poisoned(given.signature().outputs[0]))
        np.testing.assert_allclose(out.astype("float32"), given.reference(*inputs), rtol=2e-2, atol=2e-2, err_msg=f"{rows} rows")


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("tuned", [32, 64])
def test_a_kernel_that_fills_the_gpu_once_is_of_any_rows(tuned: int) -> None:
    """With more rows it would be persistent on so few SMs, and without prefetches."""
    attrs = {**GEMM, "n": 128, "k": 192, "dtype": "float16"}
    candidate = Candidate.of(
        "wgmma_matmul", {**HOPPER, "block_m": 64, "block_n": 32, "split_k": 1, "stages": 10, "stream_k": 0, "swap_ab": 1, "consumers": 1}
    )
    few, many = (replace(H200, gpu=replace(H200.the_gpu, sm_count=count)) for count in (2 * tuned // 32, MANY_SMS))
    of_few, of_many = (applied("matmul", attrs, candidate, arch) for arch in (few, many))
    unit = unit_of(dict(candidate.params))
    alone, found = for_any_rows(of_few, tuned, unit), for_any_rows(of_few, tuned, unit, of_many)
    assert found is not None
    assert alone is None or not structural.structural_equal(alone, found)
    for rows in (1, tuned, tuned + 33, 200):
        given = rule_of("matmul", attrs, rows)
        inputs = given.inputs(np.random.default_rng(rows))
        *_, out = emulate(at(found, rows), *inputs, poisoned(given.signature().outputs[0]))
        np.testing.assert_allclose(out.astype("float32"), given.reference(*inputs), rtol=2e-2, atol=2e-2, err_msg=f"{rows} rows")
    elsewhere = for_any_rows(of_few, 4 * tuned, unit, of_many)  # many waves there, too
    assert elsewhere is None or not structural.structural_equal(elsewhere, found)


@pytest.mark.parametrize(
    ("m", "upto", "tried"), [(16, 4096, [MANY_SMS]), (128, 4096, [None, MANY_SMS]), (2048, 4096, [MANY_SMS]), (128, 128, [MANY_SMS])]
)
def test_the_last_tuned_number_has_the_form_of_a_gpu_without_limit_only_where_it_has_no_other(m: int, upto: int, tried: list[Any]) -> None:
    spec = {"attrs": {"m": m}, "rows": Rows("a", "m", -1, upto, (16, 128)).to_json()}
    assert [on and on.the_gpu.sm_count for on in unlimited_archs(spec, H200)] == tried
    assert unlimited_archs(spec, HOST) == (None,)


@needs_nvcc
def test_grids_of_gpu_kernels_are_computed_of_the_rows(tmp_path: Path) -> None:
    arch = load_arch(STANDARD, "a100-80gb")
    tiles = {"block_m": 32, "block_n": 32, "block_k": 32, "warps_m": 1, "warps_n": 1, "stages": 2, "raster_group": 1, "smem_epilogue": 0}
    candidate = Candidate.of("gpu_matmul_tc", {**tiles, "split_k": 1, "double_buffer": 0})
    mod = general("matmul", {**GEMM, "dtype": "float16"}, candidate, arch)
    (launch,) = cuda.compile_cuda_object(mod, arch, "kd_rows", LocalStore(tmp_path)).launches
    assert isinstance(launch.grid[0], str)
    assert launch.block == (32, 1, 1)


def test_what_relies_on_a_number_of_rows_is_no_kernel_of_any() -> None:
    tiles = {"tile_m": 1, "tile_n": 32, "block_m": 8, "block_n": 32, "order": "mn", "block_k": 0, "pack_m": False, "pack_n": False}
    candidate = Candidate.of("cpu_matmul", tiles)
    assert for_any_rows(applied("matmul", GEMM, candidate, HOST), 16, unit_of(tiles)) is None


@pytest.mark.slow
@pytest.mark.parametrize("tuned", [300, 1024])
def test_rows_of_tiles_are_no_whole_groups(tuned: int) -> None:
    """1153 rows are ten rows of tiles, not the 16 of two groups."""
    attrs = {"n": 4096, "k": 4096, "layout": "nt", "dtype": "float16"}
    shape = {"block_m": 128, "block_n": 128, "consumers": 2, "stages": 6, "swap_ab": 0, "raster_group": 8, "split_k": 1, "stream_k": 0}
    made = general("matmul", attrs, Candidate.of("wgmma_matmul", {**HOPPER, **shape}), H200, tuned)
    text = at(made, 1153).script()
    assert "< 320" in text  # ten rows of 32 tiles
    assert "< 512" not in text


def test_a_computation_of_any_rows_is_the_same_whatever_number_it_is_made_of() -> None:
    def lowered(rows: int) -> tvm.IRModule:
        return canonical.lower(rule_of("matmul", GEMM, rows))

    digests = {canonical.module_digest(found) for tuned in (16, 128) if (found := for_any_rows(lowered, tuned, ONE_ROW))}
    assert len(digests) == 1
    assert digests.isdisjoint({canonical.module_digest(lowered(16)), canonical.module_digest(lowered(128))})


@pytest.mark.parametrize(
    ("values", "formula"),
    [
        ((96, 96, 96, 96), Formula(0, 0, 96)),
        ((15, 21, 31, 37), Formula(1, 0, 0)),
        ((2, 3, 4, 5), Formula(0, 1, 0)),
        ((16, 24, 32, 40), Formula(0, 8, 0)),
        ((15 + 16, 21 + 24, 31 + 32, 37 + 40), Formula(1, 8, 0)),
        ((15, 21, 31, 38), None),
        ((1, 1, 2, 2), None),
    ],
)
def test_integers_are_formulas_of_rows_and_units(values: tuple[int, ...], formula: Formula | None) -> None:
    assert solved([(15, 2), (21, 3), (31, 4), (37, 5)], values) == formula
