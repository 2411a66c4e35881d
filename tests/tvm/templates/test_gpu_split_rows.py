"""Split rows: recognised by what they compute, right results on the emulated GPU, proposals that fit every GPU, None for others."""

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

from kerneldecl.analysis.split_rows import SplitRowsParams, max_cluster, row_sizes_of
from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical, cuda
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.compiler.rowwise import read_rowwise
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_split_rows as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_split_rows as template

H200 = load_arch(REPOSITORY, "h200")
GPUS = ("t4", "a100-80gb", "l4", "rtx-4090", "h100-sxm", "h200", "b200")
Attrs = dict[str, Any]
LONG: list[tuple[str, Attrs]] = [
    ("softmax", {"shape": (4, 128256), "dtype": "float16"}),
    ("softmax", {"shape": (2, 8, 32000), "dtype": "bfloat16", "out_dtype": "float32"}),
    ("softmax", {"shape": (1, 1 << 22)}),
    ("layer_norm", {"shape": (3, 100001)}),
    ("rms_norm", {"shape": (1, 65536), "dtype": "float16"}),
    ("reduce", {"op": "mean", "shape": (4, 3, 25448), "axes": (1, 2), "dtype": "float16"}),
]


def rule_of(name: str, attrs: Attrs) -> Rule:
    return load_rule(REPOSITORY, name).of(REPOSITORY, attrs)


def params(width: int, threads: int, parts: int, cluster: int) -> dict[str, int]:
    return SplitRowsParams(width, threads, parts, cluster)._asdict()


def computed(rule: Rule, chosen: dict[str, int], inputs: list[Any]) -> Any:
    kernel = template.apply(canonical.lower(rule), dict(chosen), H200)
    assert kernel is not None
    (out,) = rule.signature().outputs
    *after, got = emulate(kernel["main"], *inputs, np.full(out.shape, np.nan, out.dtype))
    assert all(one.tobytes() == other.tobytes() for one, other in zip(after, inputs, strict=True))
    return got


def test_softmaxes_of_scaled_elements_are_not_proposed() -> None:
    mod = canonical.lower(rule_of("softmax", {"shape": (4, 4001), "dtype": "float16", "scale": 0.125}))
    assert read_rowwise(mod) is None
    assert policy.propose(iter_space(mod), H200, 20) == ()


@pytest.mark.parametrize(("name", "attrs"), LONG, ids=str)
def test_rows_are_recognised_by_what_they_compute(name: str, attrs: Attrs) -> None:
    mod = canonical.lower(rule_of(name, attrs))
    spec = read_rowwise(mod)
    assert spec is not None
    assert (spec.kind, spec.shape) == (name, attrs["shape"])
    assert row_sizes_of(iter_space(mod)) == spec.sizes


OTHERS: list[tuple[str, Attrs]] = [
    ("softmax", {"shape": (4, 3, 40000), "axis": 1}),
    ("softmax", {"shape": (4, 40000), "dtype": "float64"}),
    ("group_norm", {"shape": (2, 8, 5000), "groups": 1}),
    ("reduce", {"op": "sum", "shape": (4, 40000), "axes": (1,), "keepdims": True}),
    ("reduce", {"op": "sum", "shape": (40000, 4), "axes": (0,)}),
    ("reduce", {"op": "max", "shape": (4, 40000), "axes": (1,), "dtype": "int8"}),
    ("elementwise", {"op": "add", "shape": (4, 40000)}),
]


@pytest.mark.parametrize(("name", "attrs"), OTHERS, ids=str)
def test_what_is_no_such_function_is_none_and_has_no_proposal(name: str, attrs: Attrs) -> None:
    mod = canonical.lower(rule_of(name, attrs))
    assert policy.propose(iter_space(mod), H200, 5) == ()
    assert template.apply(mod, params(1, 128, 2, 2), H200) is None


def test_many_rows_and_short_rows_are_left_to_one_thread_block_each() -> None:
    for shape in ((128, 4096), (16384, 1024), (4, 10)):
        assert policy.propose(iter_space(canonical.lower(rule_of("softmax", {"shape": shape}))), H200, 5) == ()


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("name", "attrs"), at({0, 3, 5}, LONG), ids=str)
def test_proposals_fit_every_gpu_and_use_clusters_where_it_has_them(name: str, attrs: Attrs, gpu: str) -> None:
    arch, mod = load_arch(REPOSITORY, gpu), canonical.lower(rule_of(name, attrs))
    space = iter_space(mod)
    own = [dict(one.candidate.params) for one in policy.propose(space, arch, 20) if one.candidate.template == "gpu_split_rows"]
    assert own
    sizes = row_sizes_of(space)
    assert sizes is not None
    for chosen in own:
        fitting = SplitRowsParams(**chosen)  # type: ignore[arg-type]
        assert fitting.fits(sizes, arch.the_gpu)
        assert fitting.cluster <= max_cluster(arch.the_gpu)
    assert template.apply(mod, own[0], arch) is not None
    if attrs["shape"] == (4, 128256):
        assert (own[0]["cluster"] > 1) == (max_cluster(arch.the_gpu) > 1)


def test_odd_rows_are_read_in_vectors_however_many_they_are() -> None:
    for shape in ((482, 925), (12721, 3767)):
        mod = canonical.lower(rule_of("layer_norm", {"shape": shape, "dtype": "float16"}))
        own = [
            dict(one.candidate.params) for one in policy.propose(iter_space(mod), H200, 20) if one.candidate.template == "gpu_split_rows"
        ]
        wide = next(chosen for chosen in own if chosen["width"] == 8)
        kernel = template.apply(mod, wide, H200)
        assert kernel is not None
        source = (
            cuda._generated(kernel["main"].with_attr("global_symbol", "kernel"), "kernel", H200).library.imports[0].inspect_source("cuda")
        )
        assert re.search(r"= \*\(uint4\*\)\(X_ptr", source)


def test_parameters_that_do_not_fit_are_none() -> None:
    mod = canonical.lower(rule_of("softmax", {"shape": (4, 32000), "dtype": "float16"}))
    fitting = params(8, 512, 4, 4)
    assert template.apply(mod, fitting, H200) is not None
    wrong = ({"width": 16}, {"threads": 500}, {"threads": 2048}, {"parts": 5}, {"parts": 16, "cluster": 16}, {"parts": 0, "cluster": 0})
    for changed in (*wrong, {"threads": 32}, {"parts": 1, "cluster": 1, "threads": 128}, {"cluster": 2}, {"parts": 8, "threads": 1024}):
        assert template.apply(mod, fitting | changed, H200) is None, changed
    assert template.apply(mod, fitting, load_arch(REPOSITORY, "a100-80gb")) is None


EMULATED: list[tuple[str, Attrs, dict[str, int]]] = [
    ("softmax", {"shape": (2, 1000), "dtype": "float16"}, params(8, 64, 2, 2)),  # threads without a vector
    ("softmax", {"shape": (3, 1000), "dtype": "float16", "out_dtype": "float32"}, params(4, 32, 4, 1)),
    ("softmax", {"shape": (2, 512)}, params(4, 64, 2, 2)),  # all threads have one
    ("softmax", {"shape": (2, 1000), "dtype": "bfloat16", "out_dtype": "float32"}, params(4, 64, 2, 2)),
    ("softmax", {"shape": (1, 8192)}, params(4, 32, 64, 1)),  # more parts than threads
    ("layer_norm", {"shape": (2, 777)}, params(1, 64, 3, 3)),  # an odd extent, several steps
    ("layer_norm", {"shape": (2, 768), "dtype": "bfloat16"}, params(8, 32, 3, 1)),
    ("rms_norm", {"shape": (1, 2, 768), "dtype": "float16"}, params(8, 32, 3, 3)),
    ("rms_norm", {"shape": (2, 768)}, params(2, 64, 3, 1)),
    ("reduce", {"op": "mean", "shape": (3, 1000), "axes": (1,), "dtype": "float16"}, params(8, 64, 2, 2)),
    ("reduce", {"op": "max", "shape": (3, 1000), "axes": (1,)}, params(4, 32, 4, 1)),
    ("reduce", {"op": "min", "shape": (3, 7, 11), "axes": (1, 2), "dtype": "bfloat16"}, params(4, 32, 1, 1)),
    ("reduce", {"op": "sum", "shape": (777,), "axes": (0,)}, params(4, 32, 3, 1)),
    # Rows that begin and end within vectors.
    ("softmax", {"shape": (5, 1001), "dtype": "float16"}, params(8, 64, 2, 2)),
    ("layer_norm", {"shape": (3, 333), "dtype": "float16"}, params(8, 64, 1, 1)),
    ("rms_norm", {"shape": (5, 777)}, params(4, 32, 3, 1)),
    ("softmax", {"shape": (5, 3)}, params(4, 32, 1, 1)),
]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("name", "attrs", "chosen"), EMULATED, ids=str)
def test_right_results_on_the_emulated_gpu(name: str, attrs: Attrs, chosen: dict[str, int]) -> None:
    rule = rule_of(name, attrs)
    inputs = rule.inputs(np.random.default_rng(0))
    assert relative_error(computed(rule, chosen, inputs), rule.reference(*inputs)) <= rule.tolerance()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("cluster", [2, 1])
def test_softmax_of_infinities_and_nan_is_numpys(cluster: int) -> None:
    """A part without a finite element adds nothing; a row without one, with infinity or with NaN is NaN."""
    rule = rule_of("softmax", {"shape": (5, 256)})
    (x,) = rule.inputs(np.random.default_rng(0))
    x[0, :128], x[1], x[2, 200], x[3, 7] = -np.inf, -np.inf, np.inf, np.nan
    x[4] = -3e38
    x[4, 100] = 3e38
    got = computed(rule, params(2, 64, 2, cluster), [x])
    with np.errstate(invalid="ignore"):
        want = rule.reference(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-30)


@needs_nvcc
@pytest.mark.slow
def test_a_mean_far_from_zero_costs_no_precision() -> None:
    """The difference of sums of squares would have no correct digit: they are 10^10 times the variance."""
    rule = rule_of("layer_norm", {"shape": (2, 512)})
    x, gamma, beta = rule.inputs(np.random.default_rng(0))
    inputs = [(x * np.float32(0.5)).round(2) + np.float32(2.0**16), gamma, beta]
    for cluster in (1, 4):
        assert relative_error(computed(rule, params(4, 32, 4, cluster), inputs), rule.reference(*inputs)) <= rule.tolerance()


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize(
    ("name", "attrs", "gpu"),
    at(
        {1},
        [
            (*LONG[0], "h200"),
            (*LONG[1], "h200"),
            (*LONG[0], "t4"),
            (*LONG[2], "a100-80gb"),
            (*LONG[3], "h200"),
        ],
    ),
    ids=str,
)
def test_no_candidate_spills(name: str, attrs: Attrs, gpu: str, tmp_path: Path) -> None:
    arch, mod = load_arch(REPOSITORY, gpu), canonical.lower(rule_of(name, attrs))
    own = [one.candidate for one in policy.propose(iter_space(mod), arch, 20) if one.candidate.template == "gpu_split_rows"]
    most = max(own, key=lambda one: (SplitRowsParams(**dict(one.params)).threads, -SplitRowsParams(**dict(one.params)).parts))  # type: ignore[arg-type]
    for candidate in {own[0], most}:
        kernel = template.apply(mod, dict(candidate.params), arch)
        assert kernel is not None
        found = compile_cuda_object(kernel, arch, "kernel", LocalStore(tmp_path))
        assert not any(launch.usage.spill_bytes + launch.usage.stack_bytes for launch in found.launches), candidate
        assert {launch.cluster for launch in found.launches} == {(dict(candidate.params)["cluster"], 1, 1)}
