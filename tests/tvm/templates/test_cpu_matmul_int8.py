"""GEMMs of int8 by int8 on CPUs: exact results of every form, in bounds; nothing else is taken for one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from support.cpus import AVX2, AVX512, runnable
from support.guarded import touched_outside
from support.repository import REPOSITORY
from support.thinned import at
from support.unoptimised import unoptimised

from kerneldecl.analysis.cpu_features import byte_dots
from kerneldecl.arrays import aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import tensor
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cpu import PIPELINE
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.hardware.host import detect, runs
from kerneldecl.model import Arch
from kerneldecl.plugins.load import load_rule
from kerneldecl.policies import cpu_matmul_int8 as policy
from kerneldecl.templates import cpu_matmul_int8 as template

LEVEL3 = replace(runnable(AVX2), tvm_target=(("kind", "llvm"), ("mcpu", "x86-64-v3"), ("num-cores", 2)))
LEVEL4 = replace(runnable(AVX512), tvm_target=(("kind", "llvm"), ("mcpu", "x86-64-v4"), ("num-cores", 2)))
ZEN4 = replace(runnable(AVX512), tvm_target=(("kind", "llvm"), ("mcpu", "znver4"), ("num-cores", 2)))
SMALL: dict[str, Any] = {"m": 5, "n": 37, "k": 192, "weights": "int8", "scales": "column", "dtype": "int8", "activation_scales": "token"}
PARAMS = {"tile_m": 3, "tile_n": 2, "dot": "pairs"}


def arches() -> list[Arch]:
    """Return targets with dot products of bytes that this machine runs."""
    return [arch for arch in (LEVEL3, LEVEL4, detect()) if runs(str(dict(arch.tvm_target).get("mcpu", ""))) and byte_dots(arch)]


def rule_of(attrs: dict[str, Any]) -> Any:
    rule = load_rule(REPOSITORY, "matmul_quantized").of(REPOSITORY, SMALL | attrs)
    assert list(rule.problems()) == []
    return rule


def built(rule: Any, params: dict[str, Any], arch: Arch) -> Any:
    mod = template.apply(canonical.lower(rule), params, arch)
    assert mod is not None
    return tvm.compile(mod, target=unoptimised(arch), tir_pipeline=PIPELINE)["main"]


@pytest.mark.parametrize("arch", arches(), ids=lambda arch: str(dict(arch.tvm_target)["mcpu"]))
@pytest.mark.parametrize(
    "attrs",
    at(
        {2},
        [
            {},
            {"m": 1, "n": 1},
            {"m": 17, "scales": "tensor", "out_dtype": "float32"},
            {"activation_scales": "", "epilogue": ("bias", "relu"), "k": 64},
            {"epilogue": ("add",), "n": 64},
        ],
    ),
    ids=lambda attrs: ",".join(f"{name}={value}" for name, value in attrs.items()),
)
def test_proposals_compute_the_reference(attrs: dict[str, Any], arch: Arch) -> None:
    rule = rule_of(attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    proposals = policy.propose(iter_space(canonical.lower(rule)), arch, 1000)
    for each in {proposals[0], proposals[-1]}:
        out = aligned(poisoned(rule.signature().outputs[0]))
        built(rule, dict(each.candidate.params), arch)(*(tensor(aligned(array)) for array in inputs), tensor(out))
        assert relative_error(out, rule.reference(*inputs)) <= rule.tolerance(), each


@pytest.mark.parametrize("arch", arches(), ids=lambda arch: str(dict(arch.tvm_target)["mcpu"]))
@pytest.mark.parametrize("value", [-128, 127])
def test_extreme_bytes_are_added_exactly(arch: Arch, value: int) -> None:
    rule = load_rule(REPOSITORY, "matmul").of(REPOSITORY, {"m": 3, "n": 5, "k": 4096, "dtype": "int8", "layout": "nt"})
    a, w, out = np.full((3, 4096), value, "int8"), np.full((5, 4096), -128, "int8"), np.zeros((3, 5), "int32")
    for dot in byte_dots(arch):
        built(rule, PARAMS | {"dot": dot}, arch)(tensor(aligned(a)), tensor(aligned(w)), tensor(out := aligned(out)))
        assert (out == value * -128 * 4096).all(), dot


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("arch", arches(), ids=lambda arch: str(dict(arch.tvm_target)["mcpu"]))
def test_nothing_outside_of_the_arguments_is_touched(arch: Arch, at_end: bool) -> None:
    """Arguments lie beside pages that must not be read."""
    rule = rule_of({})
    assert touched_outside(rule, built(rule, PARAMS | {"dot": byte_dots(arch)[0]}, arch), at_end=at_end) == ""


@pytest.mark.parametrize(
    ("name", "attrs"),
    [
        ("matmul", {"m": 4, "n": 32, "k": 64, "layout": "nt"}),
        ("matmul", {"m": 4, "n": 32, "k": 64, "dtype": "int8", "layout": "nn"}),
        ("matmul", {"m": 4, "n": 32, "k": 64, "dtype": "int8", "layout": "nt", "batch": 2}),
        ("matmul_quantized", {"m": 4, "n": 64, "k": 128, "weights": "int8", "scales": "column"}),
        ("matmul_quantized", SMALL | {"k": 256, "scales": "block"}),
    ],
)
def test_other_computations_are_none(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(load_rule(REPOSITORY, name).of(REPOSITORY, attrs))
    assert template.apply(mod, PARAMS, LEVEL4) is None
    assert policy.propose(iter_space(mod), LEVEL4, 5) == ()


def test_only_a_target_that_has_vnni_is_given_it() -> None:
    space = iter_space(canonical.lower(rule_of({})))
    first = {arch: policy.propose(space, arch, 1)[0].candidate.params for arch in (LEVEL3, LEVEL4, ZEN4)}
    assert {arch: dict(params)["dot"] for arch, params in first.items()} == {LEVEL3: "pairs", LEVEL4: "pairs", ZEN4: "vnni"}
    assert template.apply(canonical.lower(rule_of({})), PARAMS | {"dot": "vnni"}, LEVEL4) is None
    assert policy.propose(space, runnable(AVX512), 5) == ()


@pytest.mark.parametrize("params", [{"tile_m": 0}, {"tile_m": 17}, {"tile_n": 0}, {"tile_n": 9}, {"dot": "vnni"}])
def test_none_where_parameters_do_not_fit(params: dict[str, Any]) -> None:
    assert template.apply(canonical.lower(rule_of({})), PARAMS | params, LEVEL3) is None


def test_k_that_is_no_whole_vectors_is_left_to_others() -> None:
    mod = canonical.lower(rule_of({"k": 100}))
    assert template.apply(mod, PARAMS, LEVEL3) is None
    assert policy.propose(iter_space(mod), LEVEL3, 5) == ()
