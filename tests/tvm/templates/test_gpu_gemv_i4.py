"""The template gpu_gemv_i4 computes GEMVs with 4-bit weights as the rule does, on the CPU, and compiles without spills."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from emulation import Kernel
from support.compilers import compiled_cubin, needs_nvcc
from support.repository import REPOSITORY
from support.thinned import every

from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Value
from kerneldecl.plugins.load import load_arch, load_rule
from kerneldecl.policies import gpu_gemv_i4 as policy
from kerneldecl.templates import gpu_gemv_i4
from kerneldecl.toolchain import nvcc

ROOT = REPOSITORY
SMS = 2
"""Of the GPU that is emulated, so that warps have several rows in turn."""
CUT: dict[str, Value] = {"rows": 4, "warps": 4, "stages": 3, "blocks": 1, "warps_k": 1}
CASES: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "several rows in turn": ({"n": 100, "k": 2048}, {}),
    "fewer rows than a warp takes": ({"n": 3, "k": 1024}, {}),
    "two rows, a fraction of a step": ({"n": 37, "k": 1536, "group": 256}, {"rows": 2, "stages": 5, "blocks": 2, "warps_k": 2}),
    "eight rows, scales in fours": ({"n": 21, "k": 2816}, {"rows": 8, "stages": 2}),
    "less than a step": ({"n": 16, "k": 256}, {"stages": 6}),
    "one scale per step": ({"n": 18, "k": 4096, "group": 512}, {"warps": 1}),
    "several warps along k": ({"n": 75, "k": 4096}, {"rows": 8, "stages": 2, "warps": 8, "warps_k": 4}),
    "some beyond the rows' end": ({"n": 21, "k": 2560}, {"rows": 2, "warps_k": 2}),
}


def gemm(attrs: dict[str, Any]) -> Any:
    return load_rule(ROOT, "gemv_i4").of(ROOT, {"dtype": "float16", **attrs})


def scheduled(attrs: dict[str, Any], params: dict[str, Value], arch: Arch) -> tvm.IRModule | None:
    return gpu_gemv_i4.apply(canonical.lower(gemm(attrs)), {**CUT, **params}, arch)


@needs_nvcc
@pytest.mark.parametrize("name", every(3, CASES))
def test_computes_what_the_rule_does(name: str) -> None:
    attrs, params = CASES[name]
    h200 = load_arch(ROOT, "h200")
    mod = scheduled(attrs, params, replace(h200, gpu=replace(h200.the_gpu, sm_count=SMS)))
    assert mod is not None
    rule, kernel = gemm(attrs), Kernel(mod["main"])
    # The emulator checks that L2 prefetches lie within the arguments.
    before, wait, _ = kernel.source.rpartition("__global__")[2].partition("griddepcontrol_wait()")
    assert wait
    assert "kd_prefetch" in before
    inputs = rule.inputs(np.random.default_rng(1))
    expected = rule.reference(*inputs)
    for seed in (1, 2):
        result = kernel(*inputs, np.full(attrs["n"], np.nan, "float16"), seed=seed)[-1].astype("float64")
        assert np.linalg.norm(result - expected) <= rule.tolerance() * np.linalg.norm(expected)


@needs_nvcc
@pytest.mark.parametrize(("gpu", "arch", "rows"), every(3, [("a100-80gb", "sm_80"), ("h200", "sm_90a"), ("b200", "sm_100a")], [2, 4, 8]))
def test_compiles_without_spills(gpu: str, arch: str, rows: int) -> None:
    mod = scheduled({"n": 4096, "k": 4096}, {"rows": rows, "warps": 16 if rows == 2 else 8}, load_arch(ROOT, gpu))
    assert mod is not None
    source = cuda_source(mod, load_arch(ROOT, gpu), "kernel")
    assert {"cp.async.cg.shared.global", "mma.sync.aligned.m16n8k16"} <= {word for word in WORDS if word in source}
    usage = compiled_cubin(source, arch, (*nvcc.FAST_MATH_FLAGS, *nvcc.TIRX_FLAGS)).usage.values()
    assert not any(each.stack_bytes + each.spill_bytes for each in usage)


WORDS = ("cp.async.cg.shared.global", "mma.sync.aligned.m16n8k16")


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"n": 64, "k": 1024, "dtype": "bfloat16"}, {}),
        ({"n": 64, "k": 1024, "group": 64}, {}),
        ({"n": 64, "k": 128 * 3}, {}),  # neighbouring rows' scales are 6 bytes apart
        ({"n": 64, "k": 1024}, {"rows": 3}),
        ({"n": 64, "k": 1024}, {"stages": 1}),
        ({"n": 64, "k": 1024}, {"warps": 32, "stages": 12}),
        ({"n": 64, "k": 1024}, {"warps": 33}),
    ],
)
def test_does_not_apply(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert scheduled(attrs, params, load_arch(ROOT, "h200")) is None


def test_other_computations_are_not_taken() -> None:
    lowered = canonical.lower(gemm({"n": 64, "k": 1024}))
    script = lowered["main"].script(show_meta=True)
    assert script.count("- 8") == 1
    other = tvm.IRModule({"main": tvm.script.from_source(script.replace("- 8", "- 7"))})
    arch = load_arch(ROOT, "h200")
    assert gpu_gemv_i4.apply(canonical.canonical_module(lowered["main"]), CUT, arch) is not None
    assert gpu_gemv_i4.apply(other, CUT, arch) is None


def test_gpus_without_asynchronous_copies_are_left_to_others() -> None:
    space = iter_space(canonical.lower(gemm({"n": 64, "k": 1024})))
    assert scheduled({"n": 64, "k": 1024}, {}, load_arch(ROOT, "t4")) is None
    assert policy.propose(space, load_arch(ROOT, "t4"), 20) == ()


@pytest.mark.parametrize(
    ("n", "k", "group", "gpu"),
    every(
        5,
        [(1, 128, 128), (4096, 4096, 128), (4096, 11008, 128), (16384, 16384, 256), (28672, 8192, 512)],
        ["a100-80gb", "l4", "rtx-4090", "h200", "b200"],
    ),
)
def test_what_the_policy_proposes_applies(n: int, k: int, group: int, gpu: str) -> None:
    arch, mod = load_arch(ROOT, gpu), canonical.lower(gemm({"n": n, "k": k, "group": group}))
    proposals = policy.propose(iter_space(mod), arch, 1000)
    assert policy.propose(iter_space(mod), arch, 20) == proposals[:20]
    assert len({proposal.candidate for proposal in proposals}) == len(proposals)
    cuts = [dict(proposal.candidate.params) for proposal in proposals if proposal.candidate.template == "gpu_gemv_i4"]
    assert all(gpu_gemv_i4.apply(mod, cut, arch) is not None for cut in (*cuts[:1], *cuts[-1:]))
