"""Norms with a residual or a quantised output: recognised by what they compute, right results on the emulated GPU, candidates that fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.analysis.fused_norm import FusedNormParams, norm_sizes_of
from kerneldecl.arrays import poisoned, relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.fused_norm import read_fused_norm
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_fused_norm as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_fused_norm as template

H200 = load_arch(REPOSITORY, "h200")
Attrs = dict[str, Any]
FUSED: list[tuple[str, Attrs]] = [
    (norm, {"shape": (2, 9, 1024), "residual": residual, "out_dtype": out, "dtype": dtype})
    for norm in ("rms_norm", "layer_norm")
    for residual, out, dtype in [(True, "", "float16"), (True, "int8", "float32"), (False, "float8_e4m3fn", "bfloat16")]
]


def rule_of(name: str, attrs: Attrs) -> Rule:
    return load_rule(REPOSITORY, name).of(REPOSITORY, attrs)


@pytest.mark.parametrize(("name", "attrs"), FUSED, ids=str)
def test_norms_are_recognised_by_what_they_compute(name: str, attrs: Attrs) -> None:
    mod = canonical.lower(rule_of(name, {**attrs, "eps": 3e-4}))
    spec = read_fused_norm(mod)
    assert spec is not None
    assert (spec.kind, spec.shape, spec.eps, spec.has_residual) == (name, attrs["shape"], 3e-4, attrs["residual"])
    assert norm_sizes_of(iter_space(mod)) == spec.sizes


OTHERS: list[tuple[str, Attrs]] = [
    ("rms_norm", {"shape": (4, 512)}),
    ("layer_norm", {"shape": (4, 512)}),
    ("rms_norm", {"shape": (4, 512), "residual": True, "dtype": "float64"}),
    ("softmax", {"shape": (4, 512)}),
    ("rms_norm", {"shape": (4, 100_000), "residual": True}),  # no thread block keeps such a row
]


@pytest.mark.parametrize(("name", "attrs"), OTHERS, ids=str)
def test_others_have_no_proposal_and_no_kernel(name: str, attrs: Attrs) -> None:
    mod = canonical.lower(rule_of(name, attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, FusedNormParams(4, 128, 1)._asdict(), H200) is None


def test_parameters_that_do_not_fit_have_no_kernel() -> None:
    mod = canonical.lower(rule_of("rms_norm", {"shape": (8, 4000), "residual": True, "dtype": "float16"}))
    fitting = FusedNormParams(8, 64, 2)._asdict()
    assert template.apply(mod, fitting, H200) is not None
    for changed in ({"width": 16}, {"width": 3}, {"threads": 50}, {"threads": 1024}, {"rows": 0}, {"threads": 32, "width": 1}):
        assert template.apply(mod, fitting | changed, H200) is None, changed


EMULATED: list[tuple[str, Attrs, tuple[int, int, int]]] = [
    ("rms_norm", {"shape": (5, 768), "residual": True, "dtype": "float16"}, (8, 32, 2)),  # rows beyond the last, one warp each
    ("rms_norm", {"shape": (3, 1000), "residual": True, "out_dtype": "float8_e4m3fn", "dtype": "bfloat16"}, (8, 96, 1)),  # idle threads
    ("rms_norm", {"shape": (4, 512), "out_dtype": "int8"}, (4, 64, 2)),
    ("layer_norm", {"shape": (2, 3, 333), "residual": True}, (1, 64, 1)),  # an odd row
    ("layer_norm", {"shape": (3, 200), "out_dtype": "float8_e4m3fn", "dtype": "float16"}, (4, 32, 4)),
    ("layer_norm", {"shape": (2, 1024), "residual": True, "out_dtype": "int8", "dtype": "bfloat16"}, (8, 128, 1)),
]


def computed(rule: Rule, chosen: tuple[int, int, int], inputs: list[Any]) -> list[Any]:
    kernel = template.apply(canonical.lower(rule), FusedNormParams(*chosen)._asdict(), H200)
    assert kernel is not None
    found = emulate(kernel["main"], *inputs, *(poisoned(arg) for arg in rule.signature().outputs))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(found, inputs, strict=False))
    return list(found[len(inputs) :])


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("name", "attrs", "chosen"), EMULATED, ids=str)
def test_right_results_on_the_emulated_gpu(name: str, attrs: Attrs, chosen: tuple[int, int, int]) -> None:
    rule = rule_of(name, attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    for got, want in zip(computed(rule, chosen, inputs), rule.reference(*inputs), strict=True):
        assert relative_error(got, want) <= rule.tolerance()


@needs_nvcc
@pytest.mark.parametrize("rows", at({2}, [1, 2, 3]))
def test_few_short_rows_share_one_thread_block(rows: int) -> None:
    rule = rule_of("layer_norm", {"shape": (rows, 128), "out_dtype": "float8_e4m3fn", "dtype": "float16"})
    inputs = rule.inputs(np.random.default_rng(0))
    first, *_ = policy.propose(iter_space(canonical.lower(rule)), H200, 1)
    chosen = FusedNormParams(**dict(first.candidate.params))  # type: ignore[arg-type]
    assert chosen.rows == rows
    for got, want in zip(computed(rule, chosen, inputs), rule.reference(*inputs), strict=True):
        assert relative_error(got, want) <= rule.tolerance()


@needs_nvcc
@pytest.mark.slow
def test_a_row_of_zeros_is_zeros_with_a_scale_that_is_not() -> None:
    rule = rule_of("rms_norm", {"shape": (2, 128), "out_dtype": "int8"})
    x, gamma = rule.inputs(np.random.default_rng(0))
    x[1] = 0
    got, scale = computed(rule, (4, 32, 1), [x, gamma])
    assert not got[1].any()
    assert np.abs(got[0]).max() == 127
    assert (scale > 0).all()


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(
    ("shape", "dtype"),
    at({1}, [((16384, 4096), "bfloat16"), ((288, 32768), "float32"), ((512, 8192), "bfloat16")]),
)
def test_no_candidate_spills(shape: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    mod = canonical.lower(rule_of("rms_norm", {"shape": shape, "residual": True, "out_dtype": "float8_e4m3fn", "dtype": dtype}))
    proposed = policy.propose(iter_space(mod), H200, 20)
    most = max(proposed, key=lambda one: FusedNormParams(**dict(one.candidate.params)).threads)  # type: ignore[arg-type]
    for candidate in {proposed[0].candidate, most.candidate}:
        kernel = template.apply(mod, dict(candidate.params), H200)
        assert kernel is not None
        found = compile_cuda_object(kernel, H200, "kernel", LocalStore(tmp_path))
        assert not any(launch.usage.spill_bytes + launch.usage.stack_bytes for launch in found.launches), candidate
