"""Pooling by columns of pixels: right results on the emulated GPU, the instructions it is for, None and no proposal for other functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support import sliding_windows
from support.compilers import needs_nvcc, needs_nvdisasm, sass
from support.emulated_kernel import error
from support.pools import H200, cubin_of, rule_of
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned
from kerneldecl.compiler import canonical
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import gpu_pool as policy
from kerneldecl.templates import gpu_pool as template
from kerneldecl.templates.gpu.read_pool import read_pool

SMALL: dict[str, Any] = {"op": "max", "n": 2, "h": 13, "w": 11, "c": 16, "kh": 3, "kw": 3, "stride": 2, "padding": 1, "dtype": "float16"}
RESNET: dict[str, Any] = SMALL | {"n": 64, "h": 112, "w": 112, "c": 64}
PARAMS: dict[str, Value] = {"threads": 64, "width": 8, "column": 3, "strip": 1, "ahead": 3}
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({}, {}),
    ({"op": "mean"}, {"strip": 2, "ahead": 1}),
    ({"op": "mean", "count_padding": False, "dtype": "bfloat16"}, {"column": 4, "ahead": 9}),
    ({"dtype": "bfloat16", "stride": 1}, {"column": 4, "strip": 2}),
    ({"dtype": "float32", "kh": 5, "kw": 5, "padding": 2}, {"width": 4, "column": 2, "ahead": 4}),
    ({"kh": 2, "kw": 2, "padding": 0, "c": 24}, {"column": 4, "width": 4}),
    ({"op": "mean", "dtype": "float32", "kh": 2, "kw": 2, "padding": 1, "stride": 1}, {"width": 2, "column": 5, "strip": 3, "ahead": 2}),
    ({"n": 1, "w": 3, "stride": 1, "padding": 0}, {"column": 4}),
    ({"kw": 1, "padding": 0, "h": 9, "w": 8}, {"column": 2}),
    ({"kh": 3, "kw": 2, "padding": 0, "stride": 3, "c": 6}, {"width": 2, "column": 1}),
]


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({2, 6}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert error(template, rule_of(**SMALL | attrs), PARAMS | params, H200) <= 1


@needs_nvcc
@pytest.mark.parametrize("dtype", at({0}, ["float16", "bfloat16", "float32"]))
def test_nan_and_infinities_are_maxima_as_in_numpy(dtype: str) -> None:
    """Of windows that have NaN anywhere NaN, and of windows of minus infinity alone minus infinity, at the edges as well."""
    rule = rule_of(**SMALL | {"dtype": dtype})
    [x] = rule.inputs(np.random.default_rng(0))
    x[:, :3, :3] = -np.inf
    x[0, 6, 6, ::3] = np.nan
    x[1, 12, 10, 1::2] = np.nan
    mod = template.apply(canonical.lower(rule), PARAMS | {"width": 4}, H200)
    assert mod is not None
    [out] = rule.signature().outputs
    *_, got = emulate(mod["main"], x, poisoned(out))
    want = rule.reference(x)
    assert np.isnan(want).any()
    assert np.isneginf(want).any()
    assert np.array_equal(got.astype(np.float64), want, equal_nan=True)


def test_pooling_of_models_is_recognised() -> None:
    """Relax pads in a block of its own, and tests bounds in another order."""
    maxima, means = (read_pool(canonical.canonical_module(func)) for func in (sliding_windows.large_max_pool, sliding_windows.mean_pool))
    assert maxima is not None
    assert means is not None
    assert (maxima.before, maxima.is_maximum, maxima.sizes.out_rows, maxima.sizes.stride_rows) == ((1, 1), True, 56, 2)
    assert (means.before, means.is_maximum, means.sizes.accum) == ((1, 1), False, "float32")
    assert policy.propose(iter_space(canonical.canonical_module(sliding_windows.large_max_pool)), H200, 8)


@pytest.mark.parametrize("images", [64, 8])
def test_columns_and_blocks_of_several_sizes_are_proposed_before_single_pixels(images: int) -> None:
    """A row of 56 pixels of 64 channels is 448 threads by pixels, 224 by pairs of them."""
    mod = canonical.lower(rule_of(**RESNET | {"n": images}))
    proposals = policy.propose(iter_space(mod), H200, 8)
    own = [dict(each.candidate.params) for each in proposals if each.candidate.template == "gpu_pool"]
    assert len(own) >= 4
    assert len(own) < len(proposals)
    assert len({params["column"] for params in own}) >= 3
    assert any(int(str(params["threads"])) % (448 // int(str(params["strip"]))) == 0 for params in own)
    assert all(template.apply(mod, params, H200) is not None for params in own)


@needs_nvcc
@needs_nvdisasm
def test_kernels_load_and_compare_vectors_after_their_wait(tmp_path: Path) -> None:
    """Each vector of a window is loaded once, by 16 bytes, and all of a row's before the first is used; no load comes before the wait."""
    cubin = cubin_of(template, RESNET, {"threads": 448, "width": 8, "column": 4, "strip": 1, "ahead": 3})
    operations = re.findall(r"ACQBULK|LDG\.E\S*|V?HMNMX2?\S*|STG\.E\S*|STL|LDL", sass(cubin.content, tmp_path))
    loads = [each for each in operations if each.startswith("LDG")]
    assert (loads, operations.count("STG.E.128")) == (["LDG.E.128"] * (9 * 3), 4)
    assert operations[:4] == ["ACQBULK", *["LDG.E.128"] * 3]
    assert not {"STL", "LDL"} & set(operations)
    # A pair of channels a lane: two maxima along each of nine rows and two down each of four windows, at most one instruction each.
    assert sum("MNMX" in each for each in operations) <= 4 * (9 * 2 + 4 * 2)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("op", at({0}, ["max", "mean"]))
def test_proposals_have_registers_for_the_threads_that_the_model_counts(op: str) -> None:
    attrs = RESNET | {"op": op}
    proposals = policy.propose(iter_space(canonical.lower(rule_of(**attrs))), H200, 8)
    for proposal in proposals[:3]:
        [usage] = cubin_of(template, attrs, dict(proposal.candidate.params)).usage.values()
        assert usage.spill_bytes + usage.stack_bytes == 0, proposal


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("pool2d", SMALL | {"c": 15}),
        ("conv2d", {"n": 2, "h": 13, "w": 11, "c": 16, "f": 16, "groups": 16, "kh": 3, "kw": 3, "padding": 1, "dtype": "float16"}),
        ("reduce", {"op": "max", "shape": (4, 8, 8, 16), "axes": (1, 2)}),
    ],
    ids=str,
)
def test_other_functions_are_none_and_have_no_proposal(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, PARAMS, H200) is None


def test_channels_first_are_left_to_another_template() -> None:
    assert template.apply(canonical.lower(rule_of(**SMALL | {"layout": "nchw"})), PARAMS, H200) is None


def test_windows_that_do_not_overlap_are_left_to_single_pixels() -> None:
    assert policy.propose(iter_space(canonical.lower(rule_of(**SMALL | {"kh": 2, "kw": 2, "padding": 0}))), H200, 5) == ()


@pytest.mark.parametrize("wrong", [{"threads": 33}, {"width": 16}, {"width": 1}, {"column": 8}, {"strip": 7}, {"ahead": 0}], ids=str)
def test_parameters_that_do_not_fit_are_none(wrong: dict[str, Value]) -> None:
    assert template.apply(canonical.lower(rule_of(**SMALL)), PARAMS | wrong, H200) is None
