"""Slices looked up by indices: right on the emulated GPU, whatever is read before the preceding kernel has ended, and proposals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.emulated_kernel import error
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.arrays import poisoned
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_gather as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_gather_rows as template

H200, A100 = (load_arch(REPOSITORY, name) for name in ("h200", "a100-80gb"))
FEW = {"rows": 100, "columns": 96, "indices": (4, 5), "dtype": "float16"}
CASES: list[tuple[str, dict[str, Any], dict[str, Value]]] = [
    ("embedding", FEW, {"threads": 64, "lanes": 8, "unroll": 2, "ahead": 1}),  # a slice and a half, blocks that are not whole
    ("embedding", FEW, {"threads": 96, "lanes": 32, "unroll": 1, "ahead": 0}),
    ("embedding", {"rows": 1, "columns": 4096, "indices": (3,), "dtype": "int8"}, {"threads": 64, "lanes": 64, "unroll": 4, "ahead": 1}),
    ("take", {"shape": (3, 50, 6), "indices": (7,), "axis": 1}, {"threads": 32, "lanes": 2, "unroll": 2, "ahead": 1}),
    (
        "take",
        {"shape": (2, 9, 5, 30), "indices": (3, 4), "axis": 1, "dtype": "bfloat16", "index_dtype": "int32"},
        {"threads": 128, "lanes": 64, "unroll": 1, "ahead": 1},
    ),
    ("take", {"shape": (5, 7), "indices": (11,), "axis": 1, "dtype": "float64"}, {"threads": 32, "lanes": 1, "unroll": 1, "ahead": 0}),
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("embedding", {"rows": 100, "columns": 97, "indices": (20,), "dtype": "float16"}),
    ("elementwise", {"op": "add", "shape": (33, 64)}),
    ("transpose", {"shape": (33, 77), "axes": (1, 0)}),
    ("reduce", {"op": "sum", "shape": (33, 77), "axes": (1,)}),
]


def rule_of(name: str, **attrs: Any) -> Rule:
    return load_rule(REPOSITORY, name).of(REPOSITORY, attrs)


@needs_nvcc
@pytest.mark.parametrize(("name", "attrs", "params"), at({0, 4}, CASES), ids=str)
def test_right_results_on_the_emulated_gpu(name: str, attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert error(template, rule_of(name, **attrs), params, H200) == 0


@needs_nvcc
def test_what_is_read_before_the_preceding_kernel_has_ended_is_a_hint_alone() -> None:
    rule = rule_of("embedding", **FEW)
    kernel = template.apply(canonical.lower(rule), {"threads": 64, "lanes": 16, "unroll": 1, "ahead": 1}, H200)
    assert kernel is not None
    inputs, (out,) = rule.inputs(np.random.default_rng(0)), rule.signature().outputs
    for seed in (1, 2, 3):
        assert (emulate(kernel["main"], *inputs, poisoned(out), seed=seed)[-1] == rule.reference(*inputs)).all()


@needs_nvcc
@pytest.mark.parametrize("arch", [H200, A100], ids=lambda arch: str(arch.name))
@pytest.mark.parametrize("indices", at({1}, [(each,) for each in [(512,), (8, 2048)]]), ids=str)
def test_rows_are_looked_up_so_and_do_not_spill(indices: tuple[int, ...], arch: Any, tmp_path: Path) -> None:
    mod = canonical.lower(rule_of("embedding", rows=32000, columns=4096, indices=indices, dtype="float16"))
    chosen = [proposal.candidate for proposal in policy.propose(iter_space(mod), arch, 8)]
    assert {candidate.template for candidate in chosen} == {"gpu_gather_rows", "gpu_elementwise"}
    first = next(candidate for candidate in chosen if candidate.template == "gpu_gather_rows")
    kernel = template.apply(mod, dict(first.params), arch)
    assert kernel is not None
    launches = cuda.compile_cuda_object(kernel, arch, "kernel", LocalStore(tmp_path)).launches
    assert all(launch.usage.spill_bytes == 0 for launch in launches)


@pytest.mark.parametrize(("name", "attrs"), OTHERS, ids=str)
def test_other_functions_are_none_and_have_no_proposal(name: str, attrs: dict[str, Any]) -> None:
    mod = canonical.lower(rule_of(name, **attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, {"threads": 64, "lanes": 8, "unroll": 1, "ahead": 0}, H200) is None


def test_gpus_without_dependent_launch_prefetch_nothing() -> None:
    mod = canonical.lower(rule_of("embedding", **FEW))
    params: dict[str, Value] = {"threads": 64, "lanes": 8, "unroll": 2}
    assert template.apply(mod, params | {"ahead": 0}, A100) is not None
    assert template.apply(mod, params | {"ahead": 1}, A100) is None
