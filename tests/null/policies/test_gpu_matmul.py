"""Policies for GEMMs on GPUs: what is recognised, what they propose and why tensor cores are refused, without TVM."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.iter_spaces import EXTENTS, GPUS, H200, SIZES, arch, conv2d, gemm, matmul
from support.thinned import every

from kerneldecl.analysis.contraction import Contraction, contraction_of, why_no_tensor_cores
from kerneldecl.analysis.params import ConvSimtParams, ConvTcParams, GemmSimtParams, GemmTcParams, read_params
from kerneldecl.model import IterSpace
from kerneldecl.plugins.find import STANDARD
from kerneldecl.plugins.load import load_module
from kerneldecl.plugins.policy_order import policies_behind, standard_order
from kerneldecl.policies import gpu_matmul_simt, gpu_matmul_tc, wgmma_matmul
from kerneldecl.policies.gpu import conv_tiles, conv_tiles_simt
from kerneldecl.policies.gpu.gemm_tiles import best_first
from kerneldecl.policies.gpu.time_model import occupancy


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("batch", [0, 3])
def test_gemm_is_read_with_its_layout_and_batch(layout: str, batch: int) -> None:
    found = gemm(matmul((48, 80, 24), layout, batch=batch))
    assert found.layout == layout
    assert found.extents == (batch or 1, 48, 80, 24)
    assert (found.a.position, found.b.position) == (0, 1)


def test_operands_are_recognised_by_their_axes_not_by_their_order() -> None:
    space = matmul((48, 80, 24))
    (block,) = space.blocks
    swapped = gemm(replace(space, blocks=(replace(block, reads=block.reads[::-1]),)))
    assert (swapped.a.position, swapped.b.position) == (1, 0)
    assert swapped.extents == (1, 48, 80, 24)


def test_convolution_is_a_gemm_of_pixels_and_filters() -> None:
    found = gemm(conv2d())
    assert found.extents == (1, 8 * 56 * 56, 64, 3 * 3 * 64)
    assert found.layout == "nn"
    # Channels of one pixel are contiguous, pixels of one channel are not.
    assert found.a.vector() == 8
    assert gpu_matmul_tc.propose(conv2d(), H200, 5)


@pytest.mark.parametrize(("k", "vector"), [(64, 8), (36, 4), (10, 2), (517, 1)])
def test_vectors_divide_rows_so_that_each_is_aligned(k: int, vector: int) -> None:
    assert gemm(matmul((64, 64, k), "nt")).a.vector() == vector


@pytest.mark.parametrize(
    ("space", "gpu", "reason"),
    [
        (matmul((64, 64, 64), dtype="float32"), "h200", "no mma.sync of float32 with float32 accumulators"),
        (matmul((64, 64, 64), dtype="bfloat16"), "t4", "compute capability 7.5 has no mma.sync of bfloat16"),
        (matmul((64, 64, 64), "nt", "float8_e4m3fn"), "a100-80gb", "compute capability 8.0 has no mma.sync of float8_e4m3fn"),
        (matmul((64, 64, 64), "nt", "float64", "float64"), "l4", "the GPU's tensor cores do not take float64"),
        (matmul((2, 4, 64)), "h200", "2 rows and 4 columns"),
        (matmul((1, 4096, 4096)), "h200", "(GEMV)"),
        (matmul((64, 64, 8)), "h200", "k is 8;"),
    ],
)
def test_tensor_cores_are_refused_with_a_reason(space: IterSpace, gpu: str, reason: str) -> None:
    assert reason in why_no_tensor_cores(gemm(space), arch(gpu).the_gpu)
    assert reason in gpu_matmul_tc.why_not(space, arch(gpu))
    assert gpu_matmul_tc.propose(space, arch(gpu), 20) == ()


@pytest.mark.parametrize(
    ("space", "gpu"),
    [
        (matmul((64, 64, 64)), "h200"),
        (matmul((64, 64, 64), "tt", "bfloat16"), "h200"),
        (matmul((64, 64, 64), "nt", "int8", "int32"), "h200"),
        (matmul((64, 64, 64), "tn", "int8", "int32"), "rtx-4090"),
        (matmul((64, 64, 64), "nn", "uint8", "int32"), "a100-80gb"),
        (matmul((64, 64, 64), "nn", "float64", "float64"), "a100-80gb"),
        (matmul((64, 64, 64), "nt", "float8_e4m3fn"), "l4"),
        (matmul((64, 64, 64), "tn"), "t4"),
        (matmul((64, 64, 64), "nt", "int8", "int32"), "t4"),
    ],
)
def test_tensor_cores_are_taken_where_they_apply(space: IterSpace, gpu: str) -> None:
    assert gpu_matmul_tc.why_not(space, arch(gpu)) == ""
    proposals = gpu_matmul_tc.propose(space, arch(gpu), 20)
    assert proposals
    most = arch(gpu).the_gpu.smem_per_block_optin_bytes
    for proposal in proposals:
        tiling = read_params(GemmTcParams, dict(proposal.candidate.params))
        assert gpu_matmul_tc.smem_bytes(gemm(space), tiling) <= most
        assert arch(gpu).the_gpu.async_copy or not tiling.double_buffer


@pytest.mark.parametrize(("gpu", "is_faster"), [("l4", True), ("rtx-5090", True), ("h200", False)])
def test_float8_is_slower_than_float16_where_mma_sync_converts_it(gpu: str, is_faster: bool) -> None:
    size = (4096, 4096, 4096)
    float8, float16 = (gpu_matmul_tc.propose(matmul(size, "nt", dtype), arch(gpu), 1)[0] for dtype in ("float8_e4m3fn", "float16"))
    assert (float8.predicted_secs < float16.predicted_secs) == is_faster


def test_reduction_without_a_second_operand_is_no_gemm() -> None:
    space = matmul((64, 64, 64))
    (block,) = space.blocks
    alone = replace(space, blocks=(replace(block, reads=block.reads[:1]),))
    assert contraction_of(alone) == "its reduction reads 1 operand; a GEMM has two"
    assert gpu_matmul_simt.propose(alone, H200, 20) == ()


POLICIES = {"gpu_matmul_tc": gpu_matmul_tc, "gpu_matmul_simt": gpu_matmul_simt}
DTYPES = st.sampled_from(
    [("float16", "float32"), ("float16", "float16"), ("bfloat16", "float32"), ("float32", "float32"), ("int8", "int32")]
)


@pytest.mark.parametrize(("policy", "name", "size"), every(8, POLICIES, GPUS, [(size,) for size in SIZES]))
def test_every_proposal_fits_the_gpu(policy: str, name: str, size: tuple[int, int, int]) -> None:
    dtypes = ("float16", "float32") if policy == "gpu_matmul_tc" else ("int8", "int32")
    _fits(policy, name, size, matmul(size, "nt", *dtypes))


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    name=st.sampled_from(GPUS),
    size=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    dtypes=DTYPES,
    batch=st.sampled_from([0, 0, 3]),
)
def test_every_proposal_fits_the_gpu_whatever_the_size(
    policy: str, name: str, size: tuple[int, int, int], layout: str, dtypes: tuple[str, str], batch: int
) -> None:
    _fits(policy, name, size, matmul(size, layout, *dtypes, batch))


@given(
    name=st.sampled_from(GPUS),
    size=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    dtypes=DTYPES,
    top_k=st.integers(1, 60),
)
def test_what_is_never_timed_would_not_be_proposed(
    name: str, size: tuple[int, int, int], layout: str, dtypes: tuple[str, str], top_k: int
) -> None:
    space, gpu = matmul(size, layout, *dtypes), arch(name).the_gpu
    if not gpu_matmul_tc.why_not(space, arch(name)):
        every = [estimate for _, timed in gpu_matmul_tc._groups(gemm(space), gpu) for estimate in timed()]
        assert gpu_matmul_tc.propose(space, arch(name), top_k) == tuple(best_first(every, gpu_matmul_tc.SAME_TILE))[:top_k]


def _fits(policy: str, name: str, size: tuple[int, int, int], space: IterSpace) -> None:
    gpu, read = arch(name).the_gpu, contraction_of(space)
    proposals = POLICIES[policy].propose(space, arch(name), 1000)
    assert not (proposals and isinstance(read, str)), "what is no GEMM has no tiles"
    assert len({proposal.candidate for proposal in proposals}) == len(proposals)
    for proposal in proposals:
        assert isinstance(read, Contraction)
        params: dict[str, Any] = dict(proposal.candidate.params)
        if policy == "gpu_matmul_tc":
            tc = GemmTcParams(**params)
            threads, registers, smem = tc.warps * 32, gpu_matmul_tc.registers(read, tc), gpu_matmul_tc.smem_bytes(read, tc)
        else:
            simt = GemmSimtParams(**params)
            threads, registers, smem = simt.threads, gpu_matmul_simt.registers(simt, gpu), gpu_matmul_simt.smem_bytes(read, simt)
        assert occupancy(gpu, threads, registers, smem) >= 1
        rows = -(-read.extents[1] // params["block_m"])
        assert rows % params["raster_group"] == 0
        assert params["stages"] <= 1 + -(-size[2] // params["block_k"])


@pytest.mark.parametrize(("name", "c", "f"), every(3, GPUS, [(3, 64), (3, 17), (8, 96), (64, 64)]))
def test_image_tiles_fit_the_gpu(name: str, c: int, f: int) -> None:
    gpu, space = arch(name).the_gpu, conv2d(c, f)
    window = conv_tiles.sliding_window_of(space, gemm(space))
    assert window is not None
    proposals = gpu_matmul_tc.propose(space, arch(name), 1000)
    conv_proposals = [proposal for proposal in proposals if proposal.candidate.template == "gpu_conv2d_tc"]
    for proposal in conv_proposals:
        params: dict[str, Any] = dict(proposal.candidate.params)
        tiling = ConvTcParams(**params)
        assert tiling.warps * 32 <= gpu.max_threads_per_block
        assert conv_tiles.smem_bytes(window, gemm(space), tiling) <= gpu.smem_per_block_optin_bytes
    # Long reductions are left to the GEMM template, which does not unroll them.
    assert bool(conv_proposals) == (bool(proposals) and 9 * c <= 16 * 16)


@pytest.mark.parametrize(("name", "c", "f"), every(4, GPUS, [(3, 64), (3, 17), (8, 96), (16, 64)]))
def test_image_tiles_on_cuda_cores_fit_the_gpu(name: str, c: int, f: int) -> None:
    gpu, space = arch(name).the_gpu, conv2d(c, f, "float32")
    window = conv_tiles.sliding_window_of(space, gemm(space))
    assert window is not None
    proposals = gpu_matmul_simt.propose(space, arch(name), 1000)
    conv_proposals = [dict(found.candidate.params) for found in proposals if found.candidate.template == "gpu_conv2d_simt"]
    for params in conv_proposals:
        tiling = ConvSimtParams(**params)  # type: ignore[arg-type]
        smem = conv_tiles_simt.smem_bytes(window, gemm(space), tiling)
        assert occupancy(gpu, tiling.threads, conv_tiles_simt.registers(window, tiling, gpu), smem) >= 1
        assert tiling.row_tiles == 1 or gpu.async_copy
    # The template would unroll too much of longer filter rows.
    assert bool(conv_proposals) == (3 * c <= 36)


def test_a_gemm_without_sliding_windows_is_no_convolution() -> None:
    space = matmul((64, 64, 64))
    assert conv_tiles.sliding_window_of(space, gemm(space)) is None


@pytest.mark.parametrize("policy", [gpu_matmul_tc, gpu_matmul_simt])
def test_split_k_is_for_gemms_whose_blocks_leave_most_of_the_gpu_idle(policy: Any) -> None:
    def split_k(size: tuple[int, int, int]) -> set[object]:
        return {dict(proposal.candidate.params)["split_k"] for proposal in policy.propose(matmul(size), H200, 5)}

    assert split_k((128, 128, 65536)).isdisjoint({1})
    assert split_k((8192, 8192, 8192)) == {1}


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    size=st.tuples(st.integers(2, 256), st.integers(8, 256), st.integers(600, 32768)),
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    dtypes=DTYPES,
    batch=st.sampled_from([0, 0, 3]),
)
@example("gpu_matmul_simt", (30, 80, 4072), "nt", ("float32", "float32"), 0)  # 6 tiles took 97 us on an H200, 10 times as long as cuBLAS
@example("gpu_matmul_simt", (67, 80, 1464), "nt", ("float32", "float32"), 0)
def test_long_reductions_of_few_tiles_are_split(
    policy: str, size: tuple[int, int, int], layout: str, dtypes: tuple[str, str], batch: int
) -> None:
    proposals = [dict(found.candidate.params) for found in POLICIES[policy].propose(matmul(size, layout, *dtypes, batch), H200, 20)]
    for params in proposals[:1]:
        tiles = max(1, batch) * math.prod(-(-extent // int(params[f"block_{axis}"])) for axis, extent in zip("mn", size, strict=False))
        if tiles <= H200.the_gpu.sm_count // 4:
            assert any(int(params["split_k"]) > 1 for params in proposals)
    for params in proposals:
        assert int(params["split_k"]) == 1 or -(-size[2] // int(params["block_k"])) // int(params["split_k"]) >= 4


def test_a_second_kernel_costs_more_than_a_few_idle_sms() -> None:
    """One kernel takes 8.9 us and two take 11.6 on an H200, with the best tiles of either."""
    first, *_ = gpu_matmul_tc.propose(matmul((1024, 1024, 1024), "nt", accum_dtype="float16"), H200, 20)
    assert dict(first.candidate.params)["split_k"] == 1


@pytest.mark.parametrize("columns", [16, 32, 64])
def test_narrow_gemms_have_small_tiles_of_one_warp(columns: int) -> None:
    """A kernel shorter than its launch waits for each load and multiplication in turn; several warps would wait for one another as well."""
    params = dict(gpu_matmul_tc.propose(matmul((512, columns, 512), "nt"), H200, 1)[0].candidate.params)
    assert [params[name] for name in ("block_m", "warps_m", "warps_n", "split_k")] == [16, 1, 1, 1]
    assert params["block_n"] in (16, 32)


@pytest.mark.parametrize(("policy", "size"), every(2, [gpu_matmul_tc, gpu_matmul_simt], [(size,) for size in SIZES]))
def test_proposals_are_distinct_ordered_and_a_shorter_list_is_the_start_of_a_longer(policy: Any, size: tuple[int, int, int]) -> None:
    space = matmul(size, "nn")
    proposals = policy.propose(space, H200, 200)
    assert policy.propose(space, H200, 20) == proposals[:20]
    assert len({proposal.candidate for proposal in proposals}) == len(proposals)
    secs = {proposal.candidate: proposal.predicted_secs for proposal in proposals}
    whole = [each for each in secs if ("split_k", 1) in each.params]
    for kind in (whole, [each for each in secs if each not in whole]):
        assert sorted(kind, key=secs.__getitem__) == kind
    assert not proposals or proposals[0].predicted_secs == min(secs.values())


@pytest.mark.parametrize("size", SIZES)
def test_any_gemm_has_a_schedule_on_cuda_cores(size: tuple[int, int, int]) -> None:
    for name in GPUS:
        assert gpu_matmul_simt.propose(matmul(size, "tt"), arch(name), 1)


def test_traced_asks_all_policies_but_those_of_kernels_without_a_trace() -> None:
    traced = policies_behind(STANDARD, "traced", "cuda")
    untraced = {
        "gpu_attention_decode",
        "gpu_attention_decode_simt",
        "gpu_attention_simt",
        "gpu_attention_tc",
        "wgmma_attention",
        "gpu_cross_entropy",
        "gpu_fused_norm",
        "gpu_group_norm",
        "gpu_split_rows",
        "gpu_flat_elementwise",
        "gpu_gather",
        "gpu_matmul_scaled",
        "gpu_unaligned_elementwise",
        "gpu_arg_reduce",
        "gpu_pool",
        "gpu_rotary",
        "gpu_scan",
        "gpu_scatter_add",
        "gpu_topk",
        "gpu_grouped_conv2d",
        "wgmma_attention_decode",
        "wgmma_matmul_grouped",
        "wgmma_matmul_gated",
        "gpu_matmul_grouped",
        "gpu_matmul",
        "gpu_gemv_i4",
        "gpu_gemv_unaligned",
        "wgmma_matmul_block_scaled",
        "wgmma_matmul_quantized_int8",
        "gpu_matmul_quantized",
    }
    assert set(traced) == set(standard_order("cuda")) - untraced
    without = {"cpu_attention", "cpu_conv2d_transpose", "cpu_conv_packed", "cpu_group_norm", "cpu_matmul_grouped", "cpu_matmul_quantized"}
    without |= {"cpu_attention_decode", "cpu_matmul_int8", "cpu_matmul_panels", "cpu_scan", "cpu_scatter_add", "cpu_topk"}
    assert policies_behind(STANDARD, "traced", "cpu") == tuple(name for name in standard_order("cpu") if name not in without)
    templates = {name for policy in traced for name in load_module("policies", STANDARD, policy).TEMPLATES}
    assert not templates & set(wgmma_matmul.TEMPLATES)
