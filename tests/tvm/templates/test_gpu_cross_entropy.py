"""Cross entropies: recognised by what they compute, right results on the emulated GPU, candidates that fit, None for others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulate
from support.compilers import needs_nvcc
from support.repository import REPOSITORY
from support.thinned import at

from kerneldecl.analysis.cross_entropy import CrossEntropyParams, loss_sizes_of
from kerneldecl.arrays import relative_error
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cross_entropy import read_cross_entropy
from kerneldecl.compiler.cuda import compile_cuda_object
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_cross_entropy as policy
from kerneldecl.rule import Rule
from kerneldecl.store.local import LocalStore
from kerneldecl.templates import gpu_cross_entropy as template

H200 = load_arch(REPOSITORY, "h200")


def rule_of(**attrs: Any) -> Rule:
    return load_rule(REPOSITORY, "cross_entropy").of(REPOSITORY, {"rows": 5, "classes": 1000, **attrs})


@pytest.mark.parametrize("ignore_index", [-100, 0, 7])
def test_cross_entropies_are_recognised_by_what_they_compute(ignore_index: int) -> None:
    mod = canonical.lower(rule_of(ignore_index=ignore_index, dtype="bfloat16"))
    spec = read_cross_entropy(mod)
    assert spec is not None
    assert (spec.rows, spec.classes, spec.ignore_index) == (5, 1000, ignore_index)
    assert loss_sizes_of(iter_space(mod)) == spec.sizes


def test_others_have_no_proposal_and_no_kernel() -> None:
    softmax = canonical.lower(load_rule(REPOSITORY, "softmax").of(REPOSITORY, {"shape": (5, 1000)}))
    assert policy.propose(iter_space(softmax), H200, 5) == ()
    assert template.apply(softmax, CrossEntropyParams(4, 128, 1)._asdict(), H200) is None
    wide = canonical.lower(rule_of(dtype="float64", out_dtype="float64"))
    assert policy.propose(iter_space(wide), H200, 5) == ()
    fitting = CrossEntropyParams(8, 128, 2)._asdict()
    mod = canonical.lower(rule_of(dtype="float16"))
    assert template.apply(mod, fitting, H200) is not None
    for changed in ({"width": 16}, {"width": 3}, {"threads": 50}, {"threads": 2048}, {"unroll": 16}, {"unroll": 0}):
        assert template.apply(mod, fitting | changed, H200) is None, changed


EMULATED: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({"classes": 5000, "dtype": "float16"}, (8, 64, 2)),  # several steps, the last one not full
    ({"classes": 333}, (1, 32, 4)),  # an odd row, one warp
    ({"classes": 1024, "dtype": "bfloat16", "index_dtype": "int32", "ignore_index": 3}, (8, 128, 1)),
]


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(("attrs", "chosen"), EMULATED, ids=str)
def test_right_results_on_the_emulated_gpu(attrs: dict[str, Any], chosen: tuple[int, int, int]) -> None:
    rule = rule_of(**attrs)
    x, target = rule.inputs(np.random.default_rng(0))
    target[1] = attrs.get("ignore_index", -100)
    x[2, :200] = -np.inf  # a thread's first elements
    kernel = template.apply(canonical.lower(rule), CrossEntropyParams(*chosen)._asdict(), H200)
    assert kernel is not None
    *_, got = emulate(kernel["main"], x, target, np.full(rule.signature().outputs[0].shape, np.nan, "float32"))
    assert relative_error(got, np.asarray(rule.reference(x, target))) <= 1e-4
    assert got[1] == 0


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("classes", at({0}, [32000, 128256]))
def test_no_candidate_spills(classes: int, tmp_path: Path) -> None:
    mod = canonical.lower(rule_of(rows=4096, classes=classes, dtype="bfloat16"))
    own = [one.candidate for one in policy.propose(iter_space(mod), H200, 40) if one.candidate.template == "gpu_cross_entropy"]
    most = max(own, key=lambda one: (dict(one.params)["unroll"], dict(one.params)["threads"]))  # type: ignore[arg-type,return-value]
    for candidate in {own[0], most}:
        kernel = template.apply(mod, dict(candidate.params), H200)
        assert kernel is not None
        found = compile_cuda_object(kernel, H200, "kernel", LocalStore(tmp_path))
        assert not any(launch.usage.spill_bytes + launch.usage.stack_bytes for launch in found.launches), candidate
