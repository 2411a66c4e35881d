"""Pooling with channels first: right results on the emulated GPU, the instructions it is for, proposals, None for other functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc, needs_nvdisasm, sass
from support.emulated_kernel import error
from support.pools import H200, cubin_of, rule_of
from support.repository import REPOSITORY
from support.thinned import at
from tvm import te, topi

from kerneldecl.analysis.pool import pool_of
from kerneldecl.analysis.pool_planes import PlanesParams, pieces
from kerneldecl.arrays import poisoned
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_pool as policy
from kerneldecl.templates import gpu_pool_planes as template

T4 = load_arch(REPOSITORY, "t4")
"""Without max.NaN and cp.async."""
IMAGES: dict[str, Any] = {"layout": "nchw", "n": 2, "c": 3, "h": 13, "w": 16, "dtype": "float16"}
SMALL: dict[str, Any] = IMAGES | {"op": "max", "kh": 3, "kw": 3, "stride": 2, "padding": 1}
RESNET: dict[str, Any] = SMALL | {"n": 8, "c": 64, "h": 112, "w": 112}
ODD: dict[str, Any] = SMALL | {"n": 8, "c": 176, "h": 67, "w": 67}
TINY: dict[str, Any] = SMALL | {"n": 8, "c": 288, "h": 11, "w": 11}
PARAMS: dict[str, Value] = {"threads": 32, "strip": 4, "column": 3, "ahead": 3, "staged": False}
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({}, {}),
    ({}, {"staged": True, "ahead": 1}),
    ({"w": 15, "h": 11, "c": 5}, {"strip": 1, "column": 6, "staged": True, "threads": 64}),
    ({"w": 11, "h": 11}, {"strip": 3, "column": 2}),
    ({"op": "mean", "w": 18}, {"strip": 2, "ahead": 1}),
    ({"op": "mean", "count_padding": False, "dtype": "bfloat16", "stride": 1}, {"strip": 8, "column": 4, "ahead": 9}),
    ({"dtype": "bfloat16", "stride": 1, "w": 17}, {"column": 4, "strip": 5, "staged": True}),
    ({"dtype": "float32", "kh": 5, "kw": 5, "padding": 2}, {"column": 2, "ahead": 4}),
    ({"kh": 2, "kw": 2, "padding": 0, "stride": 1, "w": 12}, {"column": 4, "strip": 8}),
    ({"op": "mean", "dtype": "float32", "kh": 2, "kw": 2, "padding": 1, "stride": 1, "w": 9}, {"strip": 3, "column": 5, "staged": True}),
    ({"n": 1, "c": 1, "w": 3, "stride": 1, "padding": 0}, {"column": 4, "strip": 1, "staged": True}),
    ({"kh": 2, "kw": 2, "padding": 0, "w": 15, "h": 12}, {"strip": 4, "column": 3}),
    ({"op": "mean", "kh": 2, "kw": 2, "padding": 0}, {"strip": 4, "column": 2, "staged": True}),
    ({"kh": 5, "kw": 5, "padding": 1, "stride": 3, "w": 24}, {"strip": 4, "column": 2}),
    ({"kh": 5, "kw": 5, "padding": 2, "stride": 1}, {"strip": 8, "column": 5, "staged": True}),
    ({"n": 3, "c": 11, "h": 4, "w": 5, "dtype": "float32"}, {"strip": 1, "column": 2, "staged": True, "threads": 96}),
]


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({5, 9}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert error(template, rule_of(**SMALL | attrs), PARAMS | params, H200) <= 1


@needs_nvcc
@pytest.mark.parametrize(("arch", "staged"), at({0, 2}, [(H200, True), (H200, False), (T4, False)]))
@pytest.mark.parametrize("dtype", at({2}, ["float16", "bfloat16", "float32"]))
def test_nan_and_infinities_are_maxima_as_in_numpy(dtype: str, arch: Arch, staged: bool) -> None:
    """Of windows that have NaN anywhere NaN, and of windows of minus infinity alone minus infinity, at the edges as well."""
    rule = rule_of(**SMALL | {"dtype": dtype, "w": 11})
    [x] = rule.inputs(np.random.default_rng(0))
    x[:, :, :3, :3] = -np.inf
    x[0, ::2, 6, 6] = np.nan
    x[1, 1:, 12, 10] = np.nan
    mod = template.apply(canonical.lower(rule), PARAMS | {"staged": staged}, arch)
    assert mod is not None
    [out] = rule.signature().outputs
    *_, got = emulate(mod["main"], x, poisoned(out))
    want = rule.reference(x)
    assert np.isnan(want).any()
    assert np.isneginf(want).any()
    assert np.array_equal(got.astype(np.float64), want, equal_nan=True)


def of_model(kind: str, dtype: str, *, ceils: bool = False) -> Any:
    """Return pooling as models have it: padding in a block of its own, and means of float32 that are converted."""
    x = te.placeholder((2, 3, 12, 10), dtype, "X")
    y = topi.nn.pool2d(x, (3, 3), (2, 2), (1, 1), (1, 1, 1, 1), kind, ceils, "NCHW", False)
    out = te.compute(y.shape, lambda *at: y(*at).astype("float16"), "Y") if dtype == "float32" else y
    return te.create_prim_func([x, out], index_dtype_override="int64")


@needs_nvcc
@pytest.mark.parametrize(
    ("kind", "dtype", "ceils"), at({1}, [("max", "float16", False), ("max", "float16", True), ("avg", "float32", False)])
)
def test_pooling_of_models_computes_the_same(kind: str, dtype: str, ceils: bool) -> None:
    mod = canonical.canonical_module(of_model(kind, dtype, ceils=ceils))
    assert policy.propose(iter_space(mod), H200, 8)
    made = template.apply(mod, PARAMS, H200)
    assert made is not None
    x = np.random.default_rng(0).standard_normal((2, 3, 12, 10)).astype(dtype)
    after = int(ceils)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1 + after), (1, 1 + after)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2, ::2]
    want = (np.nanmax if kind == "max" else np.nanmean)(windows, (-2, -1))
    *_, got = emulate(made["main"], x, np.full(want.shape, np.nan, "float16"))
    assert np.allclose(got.astype(np.float64), want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("arch", at({0}, ["h200", "a100-80gb", "rtx-4090"]))
@pytest.mark.parametrize("attrs", [RESNET, ODD, TINY], ids=["resnet", "odd", "tiny"])
def test_columns_of_several_lengths_are_proposed_from_global_and_from_shared_memory(arch: str, attrs: dict[str, Any]) -> None:
    gpu = load_arch(REPOSITORY, arch)
    mod = canonical.lower(rule_of(**attrs))
    proposals = policy.propose(iter_space(mod), gpu, 8)
    own = [dict(each.candidate.params) for each in proposals if each.candidate.template == "gpu_pool_planes"]
    assert proposals[0].candidate.template == "gpu_pool_planes"
    assert len({params["column"] for params in own}) >= 3
    assert {params["staged"] for params in own} == {False, True}
    assert all(template.apply(mod, params, gpu) is not None for params in own)


@needs_nvcc
@needs_nvdisasm
def test_kernels_load_aligned_vectors_after_their_wait(tmp_path: Path) -> None:
    """Of each row 16 bytes and the element before them, all rows before the first is used; no load comes before the wait."""
    cubin = cubin_of(template, RESNET, {"threads": 256, "strip": 4, "column": 4, "ahead": 9, "staged": False})
    operations = re.findall(r"ACQBULK|LDG\.E\S*|V?HMNMX2?\S*|STG\.E\S*|STL|LDL", sass(cubin.content, tmp_path))
    loads = [each.rstrip(";") for each in operations if each.startswith("LDG")]
    assert sorted(loads) == ["LDG.E.128"] * 9 + ["LDG.E.U16"] * 9
    assert operations[0] == "ACQBULK"
    assert all(each.startswith("LDG") for each in operations[1:19])
    assert operations.count("STG.E.64") == 4
    assert not {"STL", "LDL"} & set(operations)
    # Of each of four windows down, two maxima of five words; of each of 16 results two along.
    assert sum("MNMX" in each for each in operations) <= 4 * 2 * 5 + 16 * 2


@needs_nvcc
@needs_nvdisasm
def test_rows_that_begin_anywhere_are_copied_by_16_bytes(tmp_path: Path) -> None:
    cubin = cubin_of(template, ODD, {"threads": 256, "strip": 1, "column": 7, "ahead": 2, "staged": True})
    operations = re.findall(r"ACQBULK|LDGSTS\S*|LDG\.\S*|LDS\.\S*|STL|LDL", sass(cubin.content, tmp_path))
    copies = [each for each in operations if each.startswith("LDGSTS")]
    assert copies
    assert all(".128" in each for each in copies)
    assert operations[: 1 + len(copies)] == ["ACQBULK", *copies]
    assert all(each.startswith("LDS") for each in operations[1 + len(copies) :])


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("attrs", at({1}, [RESNET, ODD, TINY, RESNET | {"op": "mean"}]))
def test_proposals_have_registers_for_the_threads_that_the_model_counts(attrs: dict[str, Any]) -> None:
    for proposal in policy.propose(iter_space(canonical.lower(rule_of(**attrs))), H200, 8)[:3]:
        [usage] = cubin_of(template, attrs, dict(proposal.candidate.params)).usage.values()
        assert usage.spill_bytes + usage.stack_bytes == 0, proposal


@pytest.mark.parametrize(("columns", "before", "vector"), [(9, 1, 8), (12, 2, 4), (17, 0, 8), (5, 3, 1), (3, 1, 2)])
def test_each_element_of_a_row_is_in_one_aligned_load(columns: int, before: int, vector: int) -> None:
    found = pieces(columns, before, vector)
    assert [place + n for place, size in found for n in range(size)] == list(range(columns))
    assert all((place - before) % size == 0 and vector % size == 0 for place, size in found)


@pytest.mark.parametrize("attrs", [RESNET, ODD, TINY, TINY | {"kh": 5, "padding": 2, "stride": 1}], ids=str)
@pytest.mark.parametrize(("threads", "strip", "column"), [(32, 1, 1), (128, 4, 4), (512, 2, 3), (96, 1, 6)])
def test_shared_memory_holds_what_any_block_reads(attrs: dict[str, Any], threads: int, strip: int, column: int) -> None:
    sizes = pool_of(iter_space(canonical.lower(rule_of(**attrs))))
    assert sizes is not None
    params = PlanesParams(threads, strip, column, 1, True)
    strips, bands, before = params.strips(sizes), params.bands(sizes), attrs["padding"]
    for block in range(min(params.blocks(sizes), 500)):
        turns = [block * threads, min(block * threads + threads, params.turns(sizes)) - 1]
        (plane, band), (last_plane, last_band) = (divmod(turn // strips, bands) for turn in turns)
        first = plane * sizes.image_rows + max(0, band * column * sizes.stride_rows - before)
        end = last_plane * sizes.image_rows + min(sizes.image_rows, last_band * column * sizes.stride_rows - before + params.rows(sizes))
        assert -(-end * sizes.image_columns // 8) - first * sizes.image_columns // 8 <= params.staged_elements(sizes) // 8


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("pool2d", SMALL | {"layout": "nhwc", "c": 16}),
        ("conv2d", {"n": 2, "h": 13, "w": 11, "c": 16, "f": 16, "groups": 16, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}),
        ("reduce", {"op": "max", "shape": (4, 8, 8, 16), "axes": (2, 3)}),
    ],
    ids=str,
)
def test_other_functions_are_none(name: str, attrs: dict[str, Any]) -> None:
    assert template.apply(canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs)), PARAMS, H200) is None


def test_of_windows_that_do_not_overlap_small_ones_alone_have_proposals() -> None:
    small, large = SMALL | {"kh": 2, "kw": 2, "padding": 0}, SMALL | {"kh": 5, "kw": 5, "padding": 0, "stride": 5}
    assert policy.propose(iter_space(canonical.lower(rule_of(**small))), H200, 5)
    assert policy.propose(iter_space(canonical.lower(rule_of(**large))), H200, 5) == ()


@pytest.mark.parametrize("wrong", [{"threads": 33}, {"strip": 9}, {"column": 8}, {"strip": 0}, {"ahead": 0}], ids=str)
def test_parameters_that_do_not_fit_are_none(wrong: dict[str, Value]) -> None:
    assert template.apply(canonical.lower(rule_of(**SMALL)), PARAMS | wrong, H200) is None


def test_nothing_is_copied_asynchronously_where_the_gpu_cannot() -> None:
    mod = canonical.lower(rule_of(**SMALL))
    assert template.apply(mod, PARAMS | {"staged": True}, T4) is None
    proposals = policy.propose(iter_space(mod), T4, 8)
    assert proposals[0].candidate.template == "gpu_pool_planes"
    assert not any(dict(each.candidate.params).get("staged") for each in proposals)
