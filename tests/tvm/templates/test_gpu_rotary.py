"""Rotary embedding with several heads a thread: right results on the emulated GPU, no spills, None and no proposal for other functions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.compilers import needs_nvcc
from support.emulated_kernel import error
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.rotary import RotarySpec, read_rotary
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_rotary as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_rotary as template

H200 = load_arch(REPOSITORY, "h200")
SMALL: dict[str, Any] = {"batch": 2, "tokens": 6, "heads": 4, "size": 32, "dtype": "bfloat16"}
PARAMS: dict[str, Value] = {"threads": 32, "width": 8, "heads": 4}
CASES: list[tuple[dict[str, Any], dict[str, Value]]] = [
    ({}, {}),
    ({"pairs": True}, {}),
    ({"pairs": True}, {"width": 1}),
    ({"interleaved": "x"}, {"heads": 2}),
    ({"interleaved": "xy", "dtype": "float32", "pairs": True}, {"width": 4, "heads": 1}),
    ({"interleaved": "y", "dtype": "float64"}, {"width": 2}),
    ({"tokens": 4, "dtype": "float16"}, {"heads": 8}),
    ({"size": 10, "heads": 1, "batch": 1}, {"width": 1, "heads": 1}),
]


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "rotary").of(REPOSITORY, attrs)


@needs_nvcc
@pytest.mark.parametrize(("attrs", "params"), at({0, 3}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert error(template, rule_of(**SMALL | attrs), PARAMS | params, H200) <= 1


@pytest.mark.parametrize("interleaved", ["", "x", "y", "xy"])
@pytest.mark.parametrize("pairs", [False, True])
def test_what_the_rule_lowers_to_is_recognised(interleaved: str, pairs: bool) -> None:
    mod = canonical.lower(rule_of(**SMALL | {"interleaved": interleaved, "pairs": pairs}))
    assert read_rotary(mod) == RotarySpec(2, 6, 4, 32, interleaved, pairs, "bfloat16")


@needs_nvcc
@pytest.mark.parametrize(
    ("attrs", "first"), at({0, 2}, [({}, True), ({"pairs": True}, True), ({"tokens": 100, "heads": 8, "dtype": "float32"}, False)]), ids=str
)
def test_candidates_apply_and_do_not_spill(attrs: dict[str, Any], first: bool, tmp_path: Path) -> None:
    mod = canonical.lower(rule_of(**{"batch": 4, "tokens": 2048, "heads": 32, "size": 128, "dtype": "bfloat16"} | attrs))
    proposals = policy.propose(iter_space(mod), H200, 8)
    assert {proposal.candidate.template for proposal in proposals} == {"gpu_rotary", "gpu_elementwise"}
    own = [dict(proposal.candidate.params) for proposal in proposals if proposal.candidate.template == "gpu_rotary"]
    assert {params["heads"] for params in own} == {1, 2, 4, 8}
    kernels = [template.apply(mod, params, H200) for params in own]
    assert all(kernels)
    if first:
        launches = cuda.compile_cuda_object(kernels[0], H200, "kernel", LocalStore(tmp_path)).launches
        assert not any(launch.usage.spill_bytes + launch.usage.stack_bytes for launch in launches)


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("elementwise", {"op": "add", "shape": (2, 4, 6, 32)}),
        ("transpose", {"shape": (2, 4, 6, 32), "axes": (0, 2, 1, 3)}),
        ("softmax", {"shape": (33, 77)}),
    ],
    ids=str,
)
def test_other_functions_are_none_and_have_no_proposal(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, PARAMS, H200) is None


@pytest.mark.parametrize("wrong", [{"threads": 33}, {"width": 16}, {"width": 3}, {"heads": 3}, {"heads": 16}, {"threads": 2048}], ids=str)
def test_parameters_that_do_not_fit_are_none(wrong: dict[str, Value]) -> None:
    assert template.apply(canonical.lower(rule_of(**SMALL)), PARAMS | wrong, H200) is None
