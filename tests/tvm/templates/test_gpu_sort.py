"""Rows sorted in registers: right on the emulated GPU, equals in their order, no spills, None for what has no room."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_topk as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_sort as template

H200 = load_arch(REPOSITORY, "h200")
CASES: list[tuple[str, dict[str, Any], dict[str, Value]]] = [
    ("sort", {"shape": (2, 300), "dtype": "float16", "descending": True}, {"threads": 64, "items": 8}),
    ("sort", {"shape": (3, 1000)}, {"threads": 128, "items": 8}),
    ("topk", {"shape": (3, 200), "k": 5, "largest": False, "dtype": "bfloat16"}, {"threads": 32, "items": 8}),
    ("sort", {"shape": (2, 256), "dtype": "int32"}, {"threads": 64, "items": 4}),
    ("sort", {"shape": (1, 100), "dtype": "int8"}, {"threads": 128, "items": 1}),
    ("sort", {"shape": (2, 500), "dtype": "uint8", "descending": True}, {"threads": 32, "items": 16}),
    ("sort", {"shape": (2, 128), "dtype": "int16", "index_dtype": "int32"}, {"threads": 64, "items": 2}),
    ("sort", {"shape": (1, 2000)}, {"threads": 64, "items": 32}),
    ("sort", {"shape": (1, 1)}, {"threads": 32, "items": 1}),
]


def rule_of(name: str, **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name).of(REPOSITORY, attrs)


def check(rule: Rule, params: dict[str, Value], x: np.ndarray) -> None:
    kernel = template.apply(canonical.lower(rule), params, H200)
    assert kernel is not None
    values, indices = rule.reference(x)
    _, got, places = emulate(kernel["main"], x, *map(poisoned, rule.signature().outputs))
    assert (places == indices).all()
    assert np.array_equal(got.astype(np.float64), values.astype(np.float64), equal_nan=True)


@needs_nvcc
@pytest.mark.parametrize(("name", "attrs", "params"), at({0, 3}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(name: str, attrs: dict[str, Any], params: dict[str, Value]) -> None:
    rule = rule_of(name, **attrs)
    (x,) = rule.inputs(np.random.default_rng(3))
    check(rule, params, x)


@needs_nvcc
@pytest.mark.parametrize("dtype", at({0}, ["float16", "float32"]))
@pytest.mark.parametrize("descending", [False, True])
def test_equal_elements_and_nan_are_sorted_in_their_order(descending: bool, dtype: str) -> None:
    x = np.random.default_rng(0).choice(np.array([1, 1, -0.0, 0.0, np.nan, -np.inf, np.inf, -2]), (2, 250)).astype(dtype)
    check(rule_of("sort", shape=x.shape, dtype=dtype, descending=descending), {"threads": 32, "items": 8}, x)


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("dtype", at({0}, ["float32", "float16"]))
def test_candidates_apply_and_do_not_spill(dtype: str, tmp_path: Path) -> None:
    mod = canonical.lower(rule_of("sort", shape=(1024, 4096), dtype=dtype))
    proposals = policy.propose(iter_space(mod), H200, 8)
    assert {proposal.candidate.template for proposal in proposals} == {"gpu_sort", "gpu_topk"}
    own = [dict(proposal.candidate.params) for proposal in proposals if proposal.candidate.template == "gpu_sort"]
    for number, params in enumerate(own[:2]):
        kernel = template.apply(mod, params, H200)
        assert kernel is not None
        launches = cuda.compile_cuda_object(kernel, H200, f"kernel{number}", LocalStore(tmp_path)).launches
        assert not any(launch.usage.spill_bytes + launch.usage.stack_bytes for launch in launches)


@pytest.mark.parametrize(
    ("name", "attrs", "sorted_first"),
    [
        ("sort", {"shape": (64, 16384)}, True),
        ("topk", {"shape": (4096, 256), "k": 8}, True),
        ("topk", {"shape": (1000, 4096), "k": 8}, False),
    ],
    ids=str,
)
def test_where_few_elements_are_asked_for_they_are_chosen_first(name: str, attrs: dict[str, Any], sorted_first: bool) -> None:
    first, *_ = policy.propose(iter_space(canonical.lower(rule_of(name, **attrs))), H200, 8)
    assert first.candidate.template == ("gpu_sort" if sorted_first else "gpu_topk")


@pytest.mark.parametrize(
    "wrong", [{"threads": 48}, {"threads": 16}, {"items": 3}, {"items": 64}, {"threads": 32, "items": 4}, {"threads": 2048}], ids=str
)
def test_parameters_that_do_not_fit_are_none(wrong: dict[str, Value]) -> None:
    mod = canonical.lower(rule_of("sort", shape=(3, 500)))
    assert template.apply(mod, {"threads": 64, "items": 8} | wrong, H200) is None
