"""GEMVs with packed weights compute what the rule does, on the CPU, compile without spills, and copy their weights in whole tiles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from emulation import EmulationError, Kernel
from support.compilers import needs_nvcc, needs_nvdisasm, sass
from support.emulated_attention import flawed
from support.packed_kernels import check, error, rule_of
from support.repository import REPOSITORY
from support.thinned import at, only

from kerneldecl.analysis.gemv_packed import GemvPackedParams
from kerneldecl.analysis.matmul_packed import packed_of
from kerneldecl.compiler import canonical
from kerneldecl.compiler.cuda import cuda_source
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch, Proposal, Value
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import gpu_matmul_packed as policy
from kerneldecl.templates import gpu_gemv_packed
from kerneldecl.toolchain import nvcc

ROOT = REPOSITORY
PLAIN: dict[str, Value] = {"rows": 64, "step": 64, "warps": 4, "tiles": 1, "stages": 3, "blocks": 1, "bulk": 0, "prefetch": 0}
CASES: dict[str, tuple[dict[str, Any], dict[str, Value]]] = {
    "one row": ({"m": 1, "n": 128, "k": 1024}, {}),
    "one row in bulk, L2 prefetch across tiles, more stages than steps of a tile": (
        {"m": 1, "n": 160, "k": 512},
        {"bulk": 1, "prefetch": 3, "stages": 5, "tiles": 2},
    ),
    "one row, zero points, tiles of 32 that share rows, the last warp has fewer steps, bias": (
        {"m": 1, "n": 80, "k": 1408, "zero_points": True, "epilogue": ("bias",)},
        {"rows": 32, "step": 128, "tiles": 2, "prefetch": 1},
    ),
    "one row, bfloat16, zero points, groups of 32, tiles of 16 in bulk, two stages": (
        {"m": 1, "n": 48, "k": 1536, "group": 32, "dtype": "bfloat16", "zero_points": True},
        {"rows": 16, "step": 256, "tiles": 2, "stages": 2, "bulk": 1, "prefetch": 1},
    ),
    "one row, a scale for each column, the last warp has no steps": (
        {"m": 1, "n": 64, "k": 320, "scales": "column", "zero_points": True},
        {"warps": 5, "bulk": 1},
    ),
    "one row, groups of 512, longer than steps, bias and residual": (
        {"m": 1, "n": 64, "k": 1024, "group": 512, "epilogue": ("bias", "add")},
        {"step": 128, "warps": 3},
    ),
    "three rows, bfloat16, groups of 64": (
        {"m": 3, "n": 112, "k": 960, "group": 64, "dtype": "bfloat16"},
        {"tiles": 2, "bulk": 1},
    ),
    "one row, alone on an SM, prefetch of all steps": ({"m": 1, "n": 160, "k": 512}, {"rows": 32, "tiles": 2, "alone": 1, "prefetch": 4}),
    "eight rows, zero points, tiles of 32": ({"m": 8, "n": 96, "k": 1024, "zero_points": True}, {"rows": 32, "step": 256}),
}  # fmt: skip
OF_EACH_KIND = (
    "one row, alone on an SM, prefetch of all steps",
    "one row in bulk, L2 prefetch across tiles, more stages than steps of a tile",
    "one row, zero points, tiles of 32 that share rows, the last warp has fewer steps, bias",
    "three rows, bfloat16, groups of 64",
)


def made(attrs: dict[str, Any], params: dict[str, Value], arch: Arch) -> Any:
    return gpu_gemv_packed.apply(canonical.lower(rule_of(attrs)), {**PLAIN, **params}, arch)


@needs_nvcc
@pytest.mark.parametrize("name", only(OF_EACH_KIND, CASES))
def test_computes_what_the_rule_does(name: str) -> None:
    attrs, params = CASES[name]
    mod = made(attrs, params, load_arch(ROOT, "h200"))
    assert mod is not None
    check(mod, rule_of(attrs), has_prefetch=bool(params.get("prefetch")))


@needs_nvcc
@pytest.mark.parametrize(
    ("flaw", "params"),
    [
        (r"wait_for_copies<STAGES - 2>\(\);", {}),  # reads weights that are on their way
        (r"      wait_for_weights\(warp, stage, turn\);", {"bulk": 1}),
        (r"(?<=wait_for_copies<0>\(\);\n)  __syncthreads\(\);", {}),  # adds up sums of warps that still multiply
    ],
)
def test_a_missing_wait_is_noticed(flaw: str, params: dict[str, Value], monkeypatch: pytest.MonkeyPatch) -> None:
    attrs = {"m": 1, "n": 64, "k": 1024}
    mod = made(attrs, params, load_arch(ROOT, "h200"))
    flawed(monkeypatch, lambda source: re.sub(flaw, "", source))
    with pytest.raises(EmulationError):
        error(Kernel(mod["main"]), rule_of(attrs))


def proposed(attrs: dict[str, Any], gpu: str, top_k: int) -> list[Proposal]:
    """Return the GEMVs among the proposals."""
    found = policy.propose(iter_space(canonical.lower(rule_of(attrs))), load_arch(ROOT, gpu), top_k)
    return [each for each in found if each.candidate.template == "gpu_gemv_packed"]


@needs_nvcc
@needs_nvdisasm
@pytest.mark.parametrize(
    ("gpu", "target", "attrs"),
    at(
        {1, 2},
        [
            ("a100-80gb", "sm_80", {"m": 1, "dtype": "bfloat16"}),
            ("a100-80gb", "sm_80", {"m": 1}),
            ("h200", "sm_90a", {"m": 1}),
            ("h200", "sm_90a", {"m": 4, "zero_points": True, "group": 64}),
        ],
    ),
)
def test_the_first_choice_compiles_without_spills(gpu: str, target: str, attrs: dict[str, Any], tmp_path: Path) -> None:
    arch, sizes = load_arch(ROOT, gpu), {"n": 8192, "k": 8192, **attrs}
    first, *_ = proposed(sizes, gpu, 100)
    params = GemvPackedParams(**dict(first.candidate.params))  # type: ignore[arg-type]
    mod = made(sizes, dict(first.candidate.params), arch)
    cubin = nvcc.compile_cubin(cuda_source(mod, arch, "kernel"), target, (*nvcc.FAST_MATH_FLAGS, *nvcc.TIRX_FLAGS))
    [usage] = cubin.usage.values()
    assert usage.stack_bytes + usage.spill_bytes == 0
    assert usage.registers <= params.registers(packed_of(iter_space(canonical.lower(rule_of(sizes))))) + 24
    code = sass(cubin.content, tmp_path)
    assert ("UBLKCP" in code) == bool(params.bulk)
    assert "LDGSTS.E.BYPASS.LTC128B.128" in code
    # A lane reads 16 bytes of each tile at once.
    assert len(re.findall(r"LDS\.128", code)) >= params.rows // 16 * (params.step // 64)


@pytest.mark.parametrize("attrs", [{"m": 1}, {"m": 4, "dtype": "bfloat16"}, {"m": 1, "k": 2112, "group": 64, "zero_points": True}])
@pytest.mark.parametrize("gpu", ["a100-80gb", "h200"])
def test_the_template_takes_every_candidate(gpu: str, attrs: dict[str, Any]) -> None:
    sizes = {"n": 8192, "k": 2048, **attrs}
    proposals = proposed(sizes, gpu, 1000)
    assert 2 <= len(proposals) <= 10
    assert proposals[0].predicted_secs == min(each.predicted_secs for each in proposals)
    assert {dict(each.candidate.params)["bulk"] for each in proposals[:2]} == ({0, 1} if gpu == "h200" else {0})
    assert len({each.candidate for each in proposals}) == len(proposals)
    assert all(made(sizes, dict(each.candidate.params), load_arch(ROOT, gpu)) is not None for each in proposals)


def test_every_second_proposal_for_one_row_is_a_gemv_and_none_for_many_or_few_weights_or_floats() -> None:
    sizes = {"n": 8192, "k": 8192}
    first, *_ = policy.propose(iter_space(canonical.lower(rule_of({"m": 1, **sizes}))), load_arch(ROOT, "h200"), 1)
    assert first.candidate.template == "gpu_gemv_packed"
    assert len(proposed({"m": 1, **sizes}, "h200", 8)) == 4
    assert not proposed({"m": 8, **sizes}, "h200", 100)
    assert not proposed({"m": 1, "n": 512, "k": 8192}, "h200", 100)  # too few thread blocks
    mxfp4 = {"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}
    assert not proposed({"m": 1, **sizes, **mxfp4}, "h200", 100)


def test_thread_blocks_are_alone_where_the_next_kernel_may_start_early() -> None:
    attrs, gpu = {"m": 1, "n": 8192, "k": 8192}, load_arch(ROOT, "h200").the_gpu
    sizes = packed_of(iter_space(canonical.lower(rule_of(attrs))))
    found = [GemvPackedParams(**dict(each.candidate.params)) for each in proposed(attrs, "h200", 1000)]  # type: ignore[arg-type]
    assert len(found) >= 4
    for params in found:
        assert gpu.smem_per_sm_bytes // (params.smem_bytes(sizes, gpu) + gpu.smem_reserved_per_block_bytes) == params.blocks
    assert not any(dict(each.candidate.params).get("alone") for each in proposed(attrs, "a100-80gb", 1000))


@pytest.mark.parametrize(
    ("attrs", "params"),
    [
        ({"layout": "rows"}, {}),
        ({"scales": "tensor"}, {}),
        ({"m": 9}, {}),
        ({"weights": "float4_e2m1fn", "scale_dtype": "float8_e8m0fnu", "group": 32}, {}),
        ({}, {"rows": 128}),
        ({"n": 48}, {"rows": 64}),
        ({}, {"step": 32}),
        ({"k": 576, "group": 64}, {"step": 128}),  # does not divide k
        ({}, {"stages": 1}),
        ({}, {"stages": 25}),
        ({}, {"warps": 9}),  # more than steps
        ({}, {"tiles": 3}),  # more than there are
        ({}, {"alone": 2}),
        ({}, {"blocks": 0}),
        ({"k": 2048}, {"warps": 32, "blocks": 3}),  # more than threads
        ({}, {"bulk": 2}),
        ({}, {"prefetch": 3}),  # more than stages
        ({"k": 8192}, {"warps": 16, "stages": 7}),  # more than shared memory
    ],
)
def test_does_not_apply(attrs: dict[str, Any], params: dict[str, Value]) -> None:
    assert made({"m": 1, "n": 128, "k": 512, **attrs}, params, load_arch(ROOT, "h200")) is None


def test_other_gpus_have_no_asynchronous_or_bulk_copies() -> None:
    sizes = {"m": 1, "n": 128, "k": 512}
    assert made(sizes, {}, load_arch(ROOT, "t4")) is None
    assert made(sizes, {}, load_arch(ROOT, "a100-80gb")) is not None
    assert made(sizes, {"bulk": 1}, load_arch(ROOT, "a100-80gb")) is None
