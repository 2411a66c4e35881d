"""Elementwise functions of odd extents: right results on the emulated GPU, vectors, None and no proposal for other functions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_flat_elementwise as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_flat_elementwise as template

H200 = load_arch(REPOSITORY, "h200")
PARAMS = {"threads": 32, "unroll": 2}


def rule_of(name: str, **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name).of(REPOSITORY, attrs)


@pytest.mark.parametrize("gpu", at({0, 3}, ["t4", "a100-80gb", "l4", "h200", "b200"]))
def test_odd_extents_are_read_in_vectors_on_every_gpu(gpu: str) -> None:
    arch = load_arch(REPOSITORY, gpu)
    for attrs in ({"op": "add", "shape": (1001, 777)}, {"op": "silu_mul", "shape": (3, 5, 70001), "dtype": "float16"}):
        mod = canonical.lower(rule_of("elementwise", **attrs))
        first = policy.propose(iter_space(mod), arch, 20)[0].candidate
        assert first.template == "gpu_flat_elementwise"
        kernel = template.apply(mod, dict(first.params), arch)
        assert kernel is not None
        library = cuda._generated(kernel["main"].with_attr("global_symbol", "kernel"), "kernel", arch).library
        assert len(set(re.findall(r"= \*\((?:float|uint)4\*\)\((x\d)_ptr", library.imports[0].inspect_source("cuda")))) == 2


OTHERS = [
    ("transpose", {"shape": (33, 77), "axes": (1, 0)}),
    ("reduce", {"op": "sum", "shape": (33, 77), "axes": (1,)}),
    ("softmax", {"shape": (33, 77)}),
    ("elementwise", {"op": "add", "shape": (33, 77), "dtype": "int8"}),
    ("elementwise", {"op": "add", "shape": (33, 77), "dtype": "float64"}),
    ("rotary", {"tokens": 3, "heads": 5, "size": 14}),
]


@pytest.mark.parametrize(("name", "attrs"), OTHERS, ids=str)
def test_other_functions_are_none_and_have_no_proposal(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(name, **attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, PARAMS, H200) is None


def test_whole_vectors_are_left_to_the_schedule() -> None:
    for attrs in ({"op": "add", "shape": (33, 80), "dtype": "float16"}, {"op": "exp", "shape": (4096,)}):
        assert policy.propose(iter_space(canonical.lower(rule_of("elementwise", **attrs))), H200, 5) == ()


def test_parameters_that_do_not_fit_are_none() -> None:
    mod = canonical.lower(rule_of("elementwise", op="add", shape=(33, 77)))
    assert template.apply(mod, PARAMS, H200) is not None
    for wrong in ({"threads": 48}, {"threads": 2048}, {"threads": 0}, {"unroll": 0}, {"unroll": 9}):
        assert template.apply(mod, PARAMS | wrong, H200) is None


EMULATED = [
    ({"op": "gelu", "shape": (7, 33), "dtype": "float16"}, PARAMS),
    ({"op": "add", "shape": (1001,)}, {"threads": 64, "unroll": 4}),  # threads without a vector
    ({"op": "silu_mul", "shape": (3, 5, 7), "dtype": "bfloat16"}, {"threads": 32, "unroll": 1}),
    ({"op": "relu", "shape": (3,)}, {"threads": 32, "unroll": 1}),  # no whole vector
    ({"op": "exp", "shape": (16, 3)}, {"threads": 32, "unroll": 1}),  # whole vectors, across rows
]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("attrs", "params"), EMULATED, ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], params: dict[str, int]) -> None:
    rule = rule_of("elementwise", **attrs)
    kernel = template.apply(canonical.lower(rule), dict(params), H200)
    assert kernel is not None
    inputs, (out,) = rule.inputs(np.random.default_rng(0)), rule.signature().outputs
    *after, got = emulate(kernel["main"], *inputs, np.full(out.shape, np.nan, inputs[0].dtype))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(after, inputs, strict=True))
    assert relative_error(got, rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize("gpu", at({1}, ["t4", "h200"]))
def test_the_first_candidate_does_not_spill(gpu: str, tmp_path: Path) -> None:
    arch, mod = load_arch(REPOSITORY, gpu), canonical.lower(rule_of("elementwise", op="gelu", shape=(4097, 4097), dtype="float16"))
    first, *_ = policy.propose(iter_space(mod), arch, 20)
    kernel = template.apply(mod, dict(first.candidate.params), arch)
    assert kernel is not None
    (launch,) = compile_launches(kernel, arch, tmp_path)
    assert not launch.usage.spill_bytes + launch.usage.stack_bytes


def compile_launches(kernel: Any, arch: Any, folder: Path) -> Any:
    return cuda.compile_cuda_object(kernel, arch, "kernel", LocalStore(folder)).launches
