"""Cumulative sums, sorted rows and rows added at indices: right on the emulated GPU and on this CPU, None and no proposal for others."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.cpu import PIPELINE, target_of
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_scatter_rows

H200, HOST = load_arch(REPOSITORY, "h200"), load_arch(REPOSITORY, "host")
KINDS = {"cumsum": "scan", "topk": "topk", "sort": "topk", "scatter_add": "scatter_add"}
CPU_PARAMS: dict[str, dict[str, Value]] = {
    "scan": {"parallel": False},
    "scatter_add": {"parallel": False},
    "topk": {"form": "insert", "parallel": False},
}
CASES: list[tuple[str, dict[str, Any], dict[str, Value]]] = [
    ("cumsum", {"shape": (3, 1000), "dtype": "float16", "exclusive": True}, {"threads": 64, "parts": 1, "unroll": 2}),
    ("cumsum", {"shape": (2, 1001), "dtype": "int32", "reverse": True}, {"threads": 64, "parts": 3, "unroll": 1}),
    ("cumsum", {"shape": (2, 50, 35), "axis": 1, "dtype": "bfloat16", "reverse": True}, {"threads": 32, "parts": 3, "unroll": 4}),
    ("cumsum", {"shape": (1, 1)}, {"threads": 32, "parts": 1, "unroll": 1}),
    ("sort", {"shape": (2, 300), "dtype": "float16", "descending": True}, {"threads": 64, "entries": 512, "kept": 0}),
    ("topk", {"shape": (2, 1001), "k": 5, "largest": False, "dtype": "bfloat16"}, {"threads": 64, "entries": 64, "kept": 1}),
    ("topk", {"shape": (3, 255), "k": 7, "dtype": "float16"}, {"threads": 32, "entries": 256, "kept": 0}),  # whole odd rows
    ("topk", {"shape": (5, 1021), "k": 60, "dtype": "uint8"}, {"threads": 64, "entries": 256, "kept": 1}),  # 16 places of a row in a vector
    ("topk", {"shape": (2, 1023), "k": 127, "dtype": "float16"}, {"threads": 64, "entries": 128, "kept": 1}),  # more than vectors
    ("topk", {"shape": (2, 1024), "k": 9, "dtype": "uint8", "index_dtype": "int32"}, {"threads": 64, "entries": 64, "kept": 1}),
    ("topk", {"shape": (1, 512), "k": 100, "dtype": "int32"}, {"threads": 64, "entries": 128, "kept": 0}),
    ("topk", {"shape": (1, 1), "k": 1}, {"threads": 32, "entries": 32, "kept": 0}),
    ("scatter_add", {"rows": 37, "columns": 12, "updates": 150, "dtype": "float16"}, {"tile_rows": 8, "lanes": 4, "width": 2, "warps": 2}),
    ("scatter_add", {"rows": 3, "columns": 33, "updates": 70, "base": False}, {"tile_rows": 4, "lanes": 16, "width": 1, "warps": 1}),
]


def rule_of(name: str, **attrs: Any) -> Rule:
    rule = load_rule(REPOSITORY, name).of(REPOSITORY, attrs)
    assert list(rule.problems()) == []
    return rule


def template_of(kind: str, rule: str) -> Any:
    return importlib.import_module(f"kerneldecl.templates.{kind}_{KINDS[rule]}")


def policy_of(kind: str, rule: str) -> Any:
    return importlib.import_module(f"kerneldecl.policies.{kind}_{KINDS[rule]}")


def wanted(rule: Rule, inputs: list[np.ndarray]) -> list[np.ndarray]:
    found = rule.reference(*inputs)
    return [found] if isinstance(found, np.ndarray) else list(found)


@needs_nvcc
@pytest.mark.parametrize(("name", "attrs", "params"), at({1, 7}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(name: str, attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = rule_of(name, **attrs)
    kernel = template_of("gpu", name).apply(canonical.lower(rule), params, H200)
    inputs, outs = rule.inputs(np.random.default_rng(3)), rule.signature().outputs
    found = emulate(kernel["main"], *inputs, *map(poisoned, outs))[-len(outs) :]
    assert all(relative_error(got, want) <= rule.tolerance() for got, want in zip(found, wanted(rule, inputs), strict=True))


LISTS: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({"rows": 37, "columns": 12, "updates": 150, "dtype": "float16"}, {"width": 2, "lanes": 8}),
    ({"rows": 3, "columns": 33, "updates": 70, "base": False}, {"width": 1, "rows": 1}),
    ({"rows": 50, "columns": 64, "updates": 1200, "index_dtype": "int32"}, {"part_rows": 16, "rows": 4, "threads": 64}),
    ({"rows": 5, "columns": 8, "updates": 1, "dtype": "int64"}, {"width": 2, "lanes": 4, "part_rows": 3}),
    ({"rows": 700, "columns": 16, "updates": 3000, "dtype": "bfloat16"}, {"width": 8, "lanes": 2, "part_rows": 600, "rows": 8}),
    ({"rows": 37, "columns": 77, "updates": 500, "dtype": "float16"}, {"width": 4}),  # elements that lie apart, and columns behind the last
    ({"rows": 3, "columns": 3, "updates": 300, "dtype": "int64", "base": False}, {"width": 2, "lanes": 1, "rows": 4}),
]
LIST_PARAMS: dict[str, Value] = {"threads": 32, "lanes": 16, "width": 4, "rows": 2, "part_rows": 8}


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({5}, LISTS), ids=str)
def test_rows_with_lists_of_updates_have_right_results(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = rule_of("scatter_add", **attrs)
    kernel = gpu_scatter_rows.apply(canonical.lower(rule), LIST_PARAMS | params, H200)
    assert kernel is not None
    inputs, (out,) = rule.inputs(np.random.default_rng(3)), rule.signature().outputs
    *_, got = emulate(kernel["main"], *inputs, poisoned(out))
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
def test_lists_have_the_order_of_the_updates_and_leave_out_rows_outside() -> None:
    """Additions in float32 whose sum depends on the order, and indices that are no row."""
    rule = rule_of("scatter_add", rows=4, columns=4, updates=300, base=False)
    kernel = gpu_scatter_rows.apply(canonical.lower(rule), LIST_PARAMS | {"lanes": 1, "part_rows": 3}, H200)
    random = np.random.default_rng(0)
    indices = random.integers(-1, 5, 300)
    updates = (random.standard_normal((300, 4)) * 10.0 ** random.integers(-4, 5, (300, 1))).astype(np.float32)
    want = np.zeros((4, 4), np.float32)
    for row, update in zip(indices, updates, strict=True):
        if 0 <= row < 4:
            want[row] += update
    *_, got = emulate(kernel["main"], indices, updates, np.full((4, 4), np.nan, np.float32))
    assert (got == want).all()


@pytest.mark.parametrize("wrong", [{"threads": 48}, {"lanes": 3}, {"width": 8}, {"rows": 9}, {"part_rows": 1 << 14}, {"rows": 0}], ids=str)
def test_lists_with_parameters_that_do_not_fit_are_none(wrong: dict[str, Value]) -> None:
    mod = canonical.lower(rule_of("scatter_add", rows=9, columns=12, updates=5))
    assert gpu_scatter_rows.apply(mod, LIST_PARAMS | wrong, H200) is None


def test_where_many_updates_may_go_to_one_row_lists_come_first() -> None:
    space = iter_space(canonical.lower(rule_of("scatter_add", rows=32000, columns=1024, updates=8192)))
    proposals = policy_of("gpu", "scatter_add").propose(space, H200, 8)
    assert proposals[0].candidate.template == "gpu_scatter_rows"
    assert {proposal.candidate.template for proposal in proposals} == {"gpu_scatter_rows", "gpu_scatter_add"}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_first_elements_of_odd_rows_are_found_in_vectors(dtype: str) -> None:
    odd, even = (
        policy_of("gpu", "topk").propose(iter_space(canonical.lower(rule_of("topk", shape=(4096, extent), k=8, dtype=dtype))), H200, 8)[0]
        for extent in (4095, 4096)
    )
    assert odd.candidate.template == even.candidate.template == "gpu_topk"
    assert odd.predicted_secs < 1.15 * even.predicted_secs


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_threads_have_several_elements_of_odd_rows_as_of_even_ones(dtype: str) -> None:
    odd, even = (
        policy_of("gpu", "scatter_add").propose(
            iter_space(canonical.lower(rule_of("scatter_add", rows=4096, columns=columns, updates=4096, dtype=dtype))), H200, 8
        )[0]
        for columns in (4095, 4096)
    )
    assert dict(odd.candidate.params)["width"] == 4
    assert odd.predicted_secs < 1.5 * even.predicted_secs


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("extent", "entries"), [(400, 32), (400, 256), (401, 32)])
def test_equal_elements_and_nan_are_chosen_in_their_order(extent: int, entries: int) -> None:
    """More equal elements than a thread block sorts are searched bit by bit."""
    rule = rule_of("topk", shape=(2, extent), k=20)
    kernel = template_of("gpu", "topk").apply(canonical.lower(rule), {"threads": 64, "entries": entries, "kept": 1}, H200)
    x = np.random.default_rng(0).choice(np.array([1.0, 1.0, -0.0, 0.0, np.nan, -np.inf], np.float32), (2, extent))
    *_, values, indices = emulate(kernel["main"], x, *map(poisoned, rule.signature().outputs))
    for got, want in zip((values, indices), rule.reference(x), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("case", at({2, 4, 8, 12}, [(each,) for each in CASES]), ids=str)
def test_right_results_on_this_cpu(case: tuple[str, dict[str, Any], dict[str, Value]]) -> None:
    name, attrs, _ = case
    rule = rule_of(name, **attrs)
    mod = canonical.lower(rule)
    proposals = policy_of("cpu", name).propose(iter_space(mod), HOST, 9)
    assert {dict(each.candidate.params)["parallel"] for each in proposals} == {True, False}
    scheduled = template_of("cpu", name).apply(mod, dict(proposals[0].candidate.params), HOST)
    kernel = tvm.compile(scheduled, target=target_of(HOST), tir_pipeline=PIPELINE)["main"]
    inputs = [aligned(array) for array in rule.inputs(np.random.default_rng(3))]
    outs = [aligned(poisoned(arg)) for arg in rule.signature().outputs]
    kernel(*map(tensor, inputs), *map(tensor, outs))
    assert all(relative_error(got, want) <= rule.tolerance() for got, want in zip(outs, wanted(rule, inputs), strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_other_functions_are_none_and_have_no_proposal(name: str) -> None:
    others = ("reduce", {"op": "sum", "shape": (33, 77), "axes": (1,)}), ("embedding", {"indices": (3,), "rows": 5, "columns": 4})
    spaces = [canonical.lower(rule_of(other, **attrs)) for other, attrs in others]
    spaces.append(
        canonical.lower(
            rule_of("cumsum" if KINDS[name] == "topk" else "topk", shape=(3, 40), **({} if KINDS[name] == "topk" else {"k": 2}))
        )
    )
    for mod in spaces:
        for kind, arch in (("gpu", H200), ("cpu", HOST)):
            assert policy_of(kind, name).propose(iter_space(mod), arch, 5) == ()
            params = next(params for other, _, params in CASES if other == name) if kind == "gpu" else CPU_PARAMS[KINDS[name]]
            assert template_of(kind, name).apply(mod, params, arch) is None


@pytest.mark.parametrize(
    ("name", "attrs", "wrong"),
    [
        ("cumsum", {"shape": (2, 1000)}, {"threads": 48, "parts": 1, "unroll": 1}),
        ("cumsum", {"shape": (2, 1000)}, {"threads": 256, "parts": 9, "unroll": 1}),
        ("topk", {"shape": (2, 100), "k": 50}, {"threads": 64, "entries": 32, "kept": 0}),
        ("topk", {"shape": (2, 100), "k": 50}, {"threads": 64, "entries": 96, "kept": 0}),
        ("scatter_add", {"rows": 9, "columns": 6, "updates": 5}, {"tile_rows": 8, "lanes": 4, "width": 4, "warps": 1}),
        ("scatter_add", {"rows": 9, "columns": 6, "updates": 5}, {"tile_rows": 4096, "lanes": 32, "width": 2, "warps": 1}),
    ],
    ids=str,
)
def test_parameters_that_do_not_fit_are_none(name: str, attrs: dict[str, Any], wrong: dict[str, Value]) -> None:
    assert template_of("gpu", name).apply(canonical.lower(rule_of(name, **attrs)), wrong, H200) is None


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["t4", "h200"])
@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("cumsum", {"shape": (512, 4096), "dtype": "float16"}),
        ("cumsum", {"shape": (1 << 22,)}),
        ("topk", {"shape": (64, 32000), "k": 50}),
        ("sort", {"shape": (64, 4096), "dtype": "bfloat16"}),
        ("scatter_add", {"rows": 3000, "columns": 1024, "updates": 8192}),
    ],
    ids=str,
)
def test_the_first_candidate_compiles_and_does_not_spill(name: str, attrs: dict[str, Any], gpu: str, tmp_path: Path) -> None:
    arch, mod = load_arch(REPOSITORY, gpu), canonical.lower(rule_of(name, **attrs))
    first, *_ = policy_of("gpu", name).propose(iter_space(mod), arch, 20)
    template = importlib.import_module(f"kerneldecl.templates.{first.candidate.template}")
    kernel = template.apply(mod, dict(first.candidate.params), arch)
    launches = cuda.compile_cuda_object(kernel, arch, "kernel", LocalStore(tmp_path)).launches
    # One-pass scans ask for 1024 threads of an SM, 64 registers each: those of addresses may not fit, which are used once.
    most = 32 if first.candidate.template == "gpu_scan_once" else 0
    assert all(launch.usage.spill_bytes <= most and launch.usage.stack_bytes <= most for launch in launches)
