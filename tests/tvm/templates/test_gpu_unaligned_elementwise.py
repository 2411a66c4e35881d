"""Elementwise functions whose rows are no whole vectors: right on the emulated GPU, results in vectors, None and no proposal for others."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from emulation import emulate, host
from support.compilers import compiled_cubin, needs_nvcc, needs_nvdisasm, sass
from support.emulated_kernel import error
from support.repository import REPOSITORY
from support.thinned import at
from tvm import te, tirx

from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_elementwise
from kerneldecl.policies import gpu_unaligned_elementwise as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_unaligned_elementwise as template
from kerneldecl.toolchain import nvcc

H200 = load_arch(REPOSITORY, "h200")
PARAMS = {"threads": 32, "unroll": 2}
ONE = {"threads": 64, "unroll": 1}


def rule_of(name: str, **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name).of(REPOSITORY, attrs)


IMAGE = {"n": 2, "h": 5, "w": 7, "c": 5, "rows": 11, "columns": 17}
EMULATED: list[tuple[str, dict[str, Any], dict[str, int]]] = [
    ("where", {"shapes": ((40, 1), (40, 33), (1, 1)), "dtype": "float16"}, PARAMS),  # a term of rows, and of no axis
    ("where", {"shapes": ((7, 33), (7, 33), (7, 33))}, {"threads": 32, "unroll": 4}),  # flat vectors of two widths
    ("where", {"shapes": ((5, 1, 33), (1, 9, 33), (5, 9, 1)), "dtype": "int64", "mask_dtype": "int32"}, ONE),
    ("cast", {"shape": (1001,), "dtype": "float32", "out_dtype": "int8"}, PARAMS),
    ("elementwise", {"op": "add", "shape": (33, 77), "dtype": "int8"}, PARAMS),  # vectors of 16
    ("cast", {"shape": (19, 21), "dtype": "uint8", "out_dtype": "float16"}, ONE),
    ("expression", {"expr": "gelu(x) * y + 1", "shapes": ((64, 33), (33,)), "dtype": "bfloat16"}, {"threads": 32, "unroll": 4}),
    ("expression", {"expr": "x - y", "shapes": ((3, 9), (3, 1)), "dtype": "float16"}, ONE),  # rows hardly longer than a vector
    ("expression", {"expr": "x * y + 1", "shapes": ((97, 3), (3,)), "dtype": "float16"}, ONE),  # vectors in four rows
    ("expression", {"expr": "(x - y) * y", "shapes": ((9, 5, 3), (9, 1, 3)), "dtype": "float16"}, PARAMS),  # rows of two axes
    ("where", {"shapes": ((65, 1), (65, 7), (1, 7)), "dtype": "float16"}, ONE),
    ("concat", {"shapes": ((9, 33), (9, 36)), "axis": -1, "dtype": "float16"}, ONE),
    ("concat", {"shapes": ((9, 33), (8, 33), (1, 33)), "axis": 0}, PARAMS),
    ("pad", {"shape": (30, 33), "pads": (1, 0, 1, 2), "value": 2.5}, PARAMS),
    ("pad", {"shape": (3, 5, 9), "pads": (1, 1, 1, 0, 2, 1), "mode": "reflect", "dtype": "float16"}, ONE),
    ("pad", {"shape": (1001,), "pads": (3, 3), "mode": "edge"}, ONE),
    ("embedding", {"indices": (3, 21), "rows": 100, "columns": 33, "dtype": "float16"}, PARAMS),
    ("take", {"shape": (40, 100), "indices": (33,), "axis": -1, "index_dtype": "int32"}, PARAMS),
    ("take", {"shape": (9, 30, 11), "indices": (5,), "axis": 1}, PARAMS),
    ("batch_norm", {"shape": (4, 24, 5, 9), "axis": 1, "activation": "relu", "dtype": "float16"}, PARAMS),  # two axes are one row
    ("batch_norm", {"shape": (2, 7, 3, 21), "axis": -1}, PARAMS),
    ("elementwise", {"op": "silu_mul", "shape": (30, 33), "halves": True, "dtype": "float16"}, ONE),
    ("transpose", {"shape": (3, 8, 5, 33), "axes": (0, 2, 1, 3)}, PARAMS),
    ("resize2d", {**IMAGE, "op": "bilinear", "layout": "nchw", "dtype": "float16"}, {"threads": 32, "unroll": 2}),
    ("resize2d", {**IMAGE, "c": 3, "op": "bilinear", "dtype": "float16"}, PARAMS),
    ("pad", {"shape": (3, 7, 3), "pads": (0, 1, 0, 1, 2, 0), "dtype": "float16"}, ONE),
    ("resize2d", {**IMAGE, "op": "nearest", "layout": "nchw", "coordinates": "asymmetric"}, ONE),
    ("resize2d", {**IMAGE, "c": 9, "op": "bilinear", "coordinates": "align_corners", "dtype": "bfloat16"}, ONE),
]


@needs_nvcc
@pytest.mark.parametrize(("name", "attrs", "params"), at({8, 13}, EMULATED), ids=str)
def test_right_results_on_the_emulated_gpu(name: str, attrs: dict[str, Any], params: dict[str, int]) -> None:
    assert error(template, rule_of(name, **attrs), params, H200) <= 1


def wide(place: Any) -> Any:
    return tirx.Cast("int64", place)


VALUES: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x, i, j: x[i, j] + wide(i) * 3, lambda x, i, _: x + i * 3),
    (lambda x, i, j: x[i, 32 - j] + wide(i) * 10**12, lambda x, i, j: x[i, 32 - j] + i * 10**12),  # beyond 32 bits
    (
        lambda x, i, j: te.if_then_else(tirx.all(i > 3, tirx.any(j < 20, i < j)), x[i - 4, 32 - j] + wide(i), wide(j)),
        lambda x, i, j: np.where((i > 3) & ((j < 20) | (i < j)), x[i - 4, 32 - j] + i, j),
    ),
]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(VALUES)))
@pytest.mark.parametrize("unroll", [1, 2])
def test_places_are_values_as_well(number: int, unroll: int) -> None:
    """Vectors of a thread are in rows of their own, or the function has one row and the template does not take several of it."""
    value, reference = VALUES[number]
    x = te.placeholder((40, 33), "int64", "X")
    y = te.compute((40, 33), lambda i, j: value(x, i, j), name="Y")
    kernel = template.apply(tvm.IRModule({"main": te.create_prim_func([x, y])}), {"threads": 32, "unroll": unroll}, H200)
    assert (kernel is None) == (number == 0 and unroll > 1)
    if kernel is not None:
        given = np.arange(40 * 33).reshape(40, 33)
        *_, got = emulate(kernel["main"], given, np.zeros_like(given))
        np.testing.assert_array_equal(got, reference(given, *np.indices((40, 33))))


def source_of(mod: Any, params: Any, arch: Any) -> str:
    kernel = template.apply(mod, dict(params), arch)
    assert kernel is not None
    library = cuda._generated(kernel["main"].with_attr("global_symbol", "kernel"), "kernel", arch).library
    return str(library.imports[0].inspect_source("cuda"))


@pytest.mark.parametrize("gpu", at({0, 2}, ["t4", "a100-80gb", "h200", "b200"]))
def test_results_are_vectors_on_every_gpu(gpu: str) -> None:
    arch = load_arch(REPOSITORY, gpu)
    for name, attrs in (
        ("where", {"shapes": ((4096, 1), (4096, 4095), (1, 1)), "dtype": "float16"}),
        ("batch_norm", {"shape": (16, 64, 55, 55), "axis": 1, "dtype": "float16"}),
        ("concat", {"shapes": ((4096, 1001), (4096, 1002)), "axis": -1}),
    ):
        mod = canonical.lower(rule_of(name, **attrs))
        first = policy.propose(iter_space(mod), arch, 20)[0].candidate
        assert first.template == "gpu_unaligned_elementwise"
        assert re.search(r"\*\((?:float|uint)4\*\)\(x\d_ptr \+ .* = ", source_of(mod, first.params, arch))


def test_what_depends_on_a_column_is_read_once_for_all_vectors_of_a_thread() -> None:
    mod = canonical.lower(rule_of("expression", expr="x + y", shapes=((4096, 1001), (1001,)), dtype="float16"))
    loads = {unroll: len(re.findall(r"x1_ptr\[", source_of(mod, {"threads": 128, "unroll": unroll}, H200))) for unroll in (1, 8)}
    assert loads == {1: 8, 8: 8}


@needs_nvcc
@needs_nvdisasm
def test_no_load_is_behind_a_branch_where_margins_exclude_elements(tmp_path: Path) -> None:
    mod = canonical.lower(rule_of("pad", shape=(4096, 4095), pads=(1, 1, 1, 1), dtype="float16"))
    kernel = template.apply(mod, {"threads": 128, "unroll": 2}, H200)
    assert kernel is not None
    cubin = compiled_cubin(host.lower(kernel["main"]).source, "sm_90a", nvcc.FAST_MATH_FLAGS)
    steps = re.findall(r"\b(LDG|BRA|BSYNC|STG)\b", sass(cubin.content, tmp_path))
    assert steps[:16] == ["LDG"] * 16


OTHERS = [
    ("reduce", {"op": "sum", "shape": (33, 77), "axes": (1,)}),
    ("softmax", {"shape": (33, 77)}),
    ("elementwise", {"op": "add", "shape": (33, 77), "dtype": "float64"}),
    ("expression", {"expr": "x + y", "shapes": ((1, 3), (3,))}),  # no vector
    ("rotary", {"tokens": 3, "heads": 5, "size": 14, "pairs": True}),
]


@pytest.mark.parametrize(("name", "attrs"), OTHERS, ids=str)
def test_other_functions_are_none_and_have_no_proposal(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(name, **attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, PARAMS, H200) is None


def test_vectors_of_rows_and_rows_read_across_are_left_to_the_schedule() -> None:
    for name, attrs in (
        ("where", {"shapes": ((64, 1), (64, 1002), (1, 1))}),
        ("transpose", {"shape": (55, 77), "axes": (1, 0)}),
        ("batch_norm", {"shape": (2, 64, 56, 56), "axis": 1}),
    ):
        assert policy.propose(iter_space(canonical.lower(rule_of(name, **attrs))), H200, 5) == ()


def test_parameters_that_do_not_fit_are_none() -> None:
    mod = canonical.lower(rule_of("where", shapes=((33, 1), (33, 77), (33, 77))))
    assert template.apply(mod, PARAMS, H200) is not None
    for wrong in ({"threads": 48}, {"threads": 2048}, {"threads": 0}, {"unroll": 0}, {"unroll": 16}):
        assert template.apply(mod, PARAMS | wrong, H200) is None


def test_odd_rows_are_predicted_to_take_little_longer_than_even_ones() -> None:
    def first(columns: int, name: str, **attrs: Any) -> float:
        shapes = tuple(tuple(columns if extent == 0 else extent for extent in shape) for shape in attrs["shapes"])
        space = iter_space(canonical.lower(rule_of(name, **attrs | {"shapes": shapes})))
        proposals = (each.propose(space, H200, 8) for each in (policy, gpu_elementwise))
        return next(found[0].predicted_secs for found in proposals if found)

    for name, attrs in (
        ("where", {"shapes": ((4096, 0), (4096, 0), (4096, 0)), "dtype": "float16"}),
        ("expression", {"expr": "x * y", "shapes": ((4096, 0), (0,)), "dtype": "float16"}),
    ):
        assert first(4095, name, **attrs) < 1.15 * first(4096, name, **attrs)


@pytest.mark.parametrize(
    ("name", "attrs", "fewest"),
    [
        # 2.4 us by one vector, 3.2 by two, 12.4 by eight on an H200; 1.6, 2.0 and 5.1.
        ("elementwise", {"op": "gelu_mul", "halves": True, "shape": (1802, 205), "dtype": "bfloat16"}, 1),
        ("batch_norm", {"shape": (26, 16, 21, 21), "axis": 1, "eps": 1e-5, "dtype": "float32"}, 1),
    ],
)
def test_threads_have_few_vectors_whose_elements_are_loaded_alone(name: str, attrs: dict[str, Any], fewest: int) -> None:
    proposals = policy.propose(iter_space(canonical.lower(rule_of(name, **attrs))), H200, 20)
    own = [dict(each.candidate.params) for each in proposals if each.candidate.template == policy.TEMPLATES[0]]
    unrolls = [int(str(params["unroll"])) for params in own]
    assert unrolls[0] == fewest
    assert unrolls.index(8) > unrolls.index(2)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("gpu", at({1}, ["t4", "h200"]))
def test_the_first_candidate_does_not_spill(gpu: str, tmp_path: Path) -> None:
    arch = load_arch(REPOSITORY, gpu)
    mod = canonical.lower(rule_of("resize2d", op="bilinear", n=8, h=99, w=99, c=64, rows=199, columns=199, layout="nchw", dtype="float16"))
    first, *_ = policy.propose(iter_space(mod), arch, 20)
    kernel = template.apply(mod, dict(first.candidate.params), arch)
    assert kernel is not None
    (launch,) = cuda.compile_cuda_object(kernel, arch, "kernel", LocalStore(tmp_path)).launches
    assert not launch.usage.spill_bytes + launch.usage.stack_bytes
