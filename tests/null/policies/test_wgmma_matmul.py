"""The policy for GEMMs on wgmma, and how it competes with the others: every proposal fits, without TVM."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.iter_spaces import EXTENTS, GPUS, H200, SIZES, arch, conv2d, gemm, matmul

from kerneldecl.analysis.contraction import IS_GEMV, Contraction
from kerneldecl.model import Gpu, IterSpace, dtype_bytes
from kerneldecl.policies import gpu_gemv, gpu_matmul, gpu_matmul_tc, wgmma_matmul
from kerneldecl.policies.gpu.gemm_tiles import Estimate
from kerneldecl.policies.hopper.ranking import KIND_PARAMS
from kerneldecl.policies.hopper.tile_widths import block_n_choices, can_multicast
from kerneldecl.policies.hopper.tilings import Result, Tiling
from kerneldecl.policies.hopper.time_model import pdl_factor

WITH_WGMMA = [name for name in GPUS if arch(name).the_gpu.wgmma_arch]
DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "tfloat32")
LAYOUTS = st.sampled_from(["nn", "nt", "tn", "tt"])


def of(dtype: str, size: tuple[int, int, int], layout: str = "nt", batch: int = 0, accum_dtype: str = "float32") -> IterSpace:
    return matmul(size, layout, dtype, "int32" if dtype == "int8" else accum_dtype, batch)


def tilings(space: IterSpace, name: str = "h200", top_k: int = 1000) -> list[Tiling]:
    proposals = wgmma_matmul.propose(space, arch(name), top_k)
    return [Tiling(**dict(proposal.candidate.params)) for proposal in proposals]  # type: ignore[arg-type]


def test_only_hopper_has_wgmma() -> None:
    assert "h200" in WITH_WGMMA
    assert {"a100-80gb", "rtx-4090", "b200"}.isdisjoint(WITH_WGMMA)


@pytest.mark.parametrize("name", sorted({*GPUS} - {*WITH_WGMMA}))
def test_nothing_is_proposed_without_wgmma(name: str) -> None:
    space = of("float16", (1024, 1024, 1024))
    assert wgmma_matmul.propose(space, arch(name), 20) == ()
    assert wgmma_matmul.why_not(space, arch(name)) == "its GPU has no wgmma"


@given(
    name=st.sampled_from(WITH_WGMMA),
    dtype=st.sampled_from(DTYPES),
    size=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    layout=LAYOUTS,
    batch=st.sampled_from([0, 0, 3]),
    accum_dtype=st.sampled_from(["float32", "float16"]),
)
@example(name="h200", dtype="float16", size=(521, 1, 1), layout="nn", batch=0, accum_dtype="float32")
def test_every_proposal_keeps_to_what_the_template_takes(
    name: str, dtype: str, size: tuple[int, int, int], layout: str, batch: int, accum_dtype: str
) -> None:
    space, gpu = of(dtype, size, layout, batch, accum_dtype if dtype == "float16" else "float32"), arch(name).the_gpu
    found = tilings(space, name)
    assert bool(found) == (wgmma_matmul.why_not(space, arch(name)) == "")
    assert len(set(found)) == len(found)
    for tiling in found:
        _keeps_to_the_template(tiling, gemm(space), gpu)


def _keeps_to_the_template(tiling: Tiling, read: Contraction, gpu: Gpu) -> None:
    a, b = (read.b, read.a) if tiling.swap_ab else (read.a, read.b)
    batch, m, n, k = read.extents
    m, n = (n, m) if tiling.swap_ab else (m, n)
    item_bytes = dtype_bytes(read.a.dtype)
    is_pingpong, is_staggered = (tiling.kernel_schedule == name for name in ("pingpong", "staggered"))
    assert tiling.block_m in ({64, 128} if is_pingpong else {64 * tiling.consumers, 128 * tiling.consumers})
    assert tiling.block_n % 8 == 0
    assert 8 <= tiling.block_n <= 256
    assert 1 <= tiling.consumers <= 3
    assert tiling.consumers == 2 or not (is_pingpong or is_staggered)
    consumer_rows = tiling.block_m if is_pingpong else tiling.block_m // tiling.consumers
    registers = consumer_rows * tiling.block_n // (256 if read.accum_dtype == "float16" else 128)
    assert registers <= {1: 192, 2: 192, 3: 104}[tiling.consumers]
    assert 2 <= tiling.stages <= 12
    assert tiling.workspace in {0, 1}
    assert 1 + tiling.workspace <= tiling.split_k <= (64 if tiling.workspace else 8)
    assert (tiling.cluster_m, tiling.cluster_n) in {(1, 1), (2, 1), (1, 2)}
    cluster_ctas = tiling.cluster_m * tiling.cluster_n
    assert cluster_ctas == 1 or tiling.split_k == 1 or tiling.workspace == 1
    # Multicast needs TMA.
    loadable = _are_tma_loadable(read, is_packed=bool(tiling.pack), is_swapped=tiling.swap_ab)
    assert cluster_ctas == 1 or all(loadable)
    # Operands are copied only where TMA cannot load them as they are.
    assert not tiling.pack or loadable != _are_tma_loadable(read, is_swapped=tiling.swap_ab) or read.a.dtype == "tfloat32"
    assert tiling.cluster_m * tiling.block_m < m + tiling.cluster_m * tiling.block_m
    assert tiling.cluster_n * tiling.block_n < n + tiling.cluster_n * tiling.block_n
    k_tiles = -(-k * item_bytes // 128)
    assert not is_staggered or (tiling.split_k == 1 and tiling.stages <= k_tiles)
    tiles = -(-m // tiling.block_m) * -(-n // tiling.block_n) * batch
    # No part of k is empty.
    assert (tiling.split_k - 1) * -(-k_tiles // tiling.split_k) < k_tiles
    assert tiling.stages <= -(-k_tiles // tiling.split_k) + 1 or tiles > gpu.sm_count
    stored = tiling.block_n if b.is_k_last or item_bytes != 2 else -(-tiling.block_n // 64) * 64
    # A CTA of a cluster reduces an equal share of accumulators, or one of whole 16 bytes.
    share = registers // tiling.split_k if registers % tiling.split_k == 0 else -(-registers // (4 * tiling.split_k)) * 4
    split_k_bytes = 128 * tiling.consumers * tiling.split_k * share * 4 if tiling.split_k > 1 and not tiling.workspace else 0
    # What it sends has room beside the stages, or in their place.
    stages_bytes = tiling.stages * (tiling.block_m + stored) * 128
    assert stages_bytes + 1024 <= gpu.smem_per_block_optin_bytes
    assert stages_bytes + split_k_bytes + 1024 <= gpu.smem_per_block_optin_bytes or stages_bytes >= split_k_bytes
    assert 128 * (tiling.consumers + 1) <= gpu.max_threads_per_block
    assert tiling.raster_group >= 1
    clusters = batch * -(-m // (tiling.block_m * tiling.cluster_m)) * -(-n // (tiling.block_n * tiling.cluster_n))
    _spreads_short_waves(tiling, clusters, gpu)
    assert a is not b


def _spreads_short_waves(tiling: Tiling, clusters: int, gpu: Gpu) -> None:
    """Check that only kernels that can have stream-K do, where the last wave is not full."""
    assert tiling.stream_k in {0, 1, 2}
    resident = gpu.sm_count // (tiling.cluster_m * tiling.cluster_n)
    if tiling.stream_k > 0:
        assert (tiling.kernel_schedule, tiling.split_k, tiling.pdl) == ("cooperative", 1, 1)
        assert tiling.consumers > 1
        assert clusters % resident > 0
        assert clusters // resident >= tiling.stream_k - 1


def _are_tma_loadable(read: Contraction, *, is_packed: bool = False, is_swapped: int = 0) -> list[bool]:
    """Say of each operand whether its rows are multiples of 16 bytes and, unless it has 16 bits, have k last; copies always do.

    wgmma's operand A of TF32 need not have k last.
    """
    if is_packed:
        return [True, True]
    _, m, n, k = read.extents
    rows = ((k if operand.is_k_last else extent, operand) for operand, extent in ((read.a, m), (read.b, n)))
    a = read.b if is_swapped else read.a
    takes = [dtype_bytes(each.dtype) == 2 or each.is_k_last or (each is a and each.dtype == "tfloat32") for each in (read.a, read.b)]
    return [row * dtype_bytes(each.dtype) % 16 == 0 and taken for (row, each), taken in zip(rows, takes, strict=True)]


@given(
    dtype=st.sampled_from([("float16", "float32"), ("float16", "float16"), ("int8", "int32"), ("tfloat32", "float32")]),
    size=st.tuples(EXTENTS, EXTENTS, EXTENTS),
    layout=LAYOUTS,
    top_k=st.integers(1, 60),
)
def test_groups_that_are_never_timed_would_not_be_proposed(
    dtype: tuple[str, str], size: tuple[int, int, int], layout: str, top_k: int
) -> None:
    space = of(dtype[0], size, layout, accum_dtype=dtype[1])
    if not wgmma_matmul.why_not(space, H200):
        result, swaps = Result(space.blocks[-1].writes[0].dtype, has_residual=False), wgmma_matmul._swap_choices(gemm(space))
        by_schedule = wgmma_matmul._by_schedule(gemm(space), result, H200.the_gpu, swaps)
        timed = {
            name: [each for group in groups for each in ([group] if isinstance(group, Estimate) else group.timed())]
            for name, groups in by_schedule.items()
        }
        every = wgmma_matmul._in_order(timed)
        assert wgmma_matmul.propose(space, H200, top_k) == tuple(every)[:top_k]


@pytest.mark.parametrize("size", SIZES)
def test_proposals_are_ordered_and_a_shorter_list_is_the_start_of_a_longer(size: tuple[int, int, int]) -> None:
    space = of("float16", size)
    proposals = wgmma_matmul.propose(space, H200, 200)
    assert wgmma_matmul.propose(space, H200, 20) == proposals[:20]
    assert all(p.predicted_secs >= proposals[0].predicted_secs for p in proposals)
    by_kind: dict[tuple[object, ...], list[float]] = {}
    for proposal in proposals:
        params = dict(proposal.candidate.params)
        by_kind.setdefault(tuple(params.get(name, 0) for name in KIND_PARAMS), []).append(proposal.predicted_secs)
    assert all(secs == sorted(secs) for secs in by_kind.values())


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (matmul((64, 64, 64), dtype="float32"), "no wgmma of float32"),
        (matmul((64, 64, 64), dtype="tfloat32", accum_dtype="float64"), "no wgmma of tfloat32 with float64 accumulators"),
        (matmul((64, 64, 64), dtype="bfloat16", accum_dtype="float16"), "no wgmma of bfloat16 with float16 accumulators"),
        (matmul((1, 1, 64)), IS_GEMV),
        (conv2d(), "not a matrix"),
    ],
)
def test_why_wgmma_does_not_take_a_computation(space: IterSpace, reason: str) -> None:
    assert reason in wgmma_matmul.why_not(space, H200)
    assert wgmma_matmul.propose(space, H200, 20) == ()


@pytest.mark.parametrize(
    ("dtype", "layout", "size", "pack"),
    [
        ("float16", "nt", (2157, 3002, 4407), {0, 1}),
        ("float16", "nn", (512, 1001, 512), {0, 1}),
        ("int8", "nt", (512, 512, 500), {0, 1}),
        ("float16", "nt", (512, 1001, 512), {0}),  # n is no operand's contiguous dimension
        ("int8", "nn", (512, 512, 512), {0, 1}),  # a copy can be transposed
    ],
)
def test_copies_are_offered_where_tma_can_read_them_alone(dtype: str, layout: str, size: tuple[int, int, int], pack: set[int]) -> None:
    assert {tiling.pack for tiling in tilings(of(dtype, size, layout))} == pack


def test_large_operands_are_copied_first() -> None:
    assert tilings(of("float16", (2157, 3002, 4407)), top_k=1)[0].pack == 1


def test_large_tiles_share_operands_by_multicast() -> None:
    first = tilings(of("float16", (8192, 8192, 8192)), top_k=1)[0]
    assert first.block_m * first.block_n >= 128 * 224
    assert first.cluster_m * first.cluster_n == 2


def test_accumulators_that_share_registers_allow_larger_tiles() -> None:
    first = tilings(of("float16", (8192, 8192, 8192), accum_dtype="float16"), top_k=1)[0]
    assert first.block_m * first.block_n * (2 if first.is_pingpong else 1) >= 256 * 256


@pytest.mark.parametrize("size", [4096, 8192, 16384])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_the_first_few_for_large_gemms_have_all_kernel_schedules(size: int, layout: str) -> None:
    first = tilings(of("float16", (size, size, size), layout), top_k=9)
    assert {tiling.kernel_schedule for tiling in first} == {"cooperative", "staggered", "pingpong"}
    assert len({(tiling.kernel_schedule, tiling.block_m, tiling.block_n) for tiling in first}) >= 5


@pytest.mark.parametrize("size", [16384, 8192, 5120, 4224])
def test_stream_k_is_tried_where_the_last_wave_leaves_sms_idle(size: int) -> None:
    found = tilings(of("float16", (size, size, size), "nn"), top_k=8)
    assert {0, 1} <= {min(tiling.stream_k, 1) for tiling in found}


def test_long_kernels_whose_ctas_fill_an_sm_use_pdl() -> None:
    assert {tiling.pdl for tiling in tilings(of("float16", (8192, 8192, 8192)), top_k=20)} == {1}


def test_stream_k_is_not_tried_where_the_last_wave_is_nearly_full() -> None:
    for tiling in tilings(of("float16", (4096, 4096, 4096), "nn")):
        tiles = 4096 // 128 * 4096 // 128 * 128 * 128 / (tiling.block_m * tiling.block_n)
        assert not tiling.stream_k or (tiles / 132) % 1 < 0.85


@pytest.mark.parametrize("m", [1, 8, 16, 32])
def test_few_rows_become_narrow_columns_by_swapping_and_all_sms_read_weights(m: int) -> None:
    n = 4096
    for tiling in tilings(of("float16", (m, n, 4096)), top_k=4):
        assert tiling.swap_ab == 1
        assert tiling.block_n <= max(16, 2 * m)
        assert -(-n // tiling.block_m) * tiling.split_k >= 64  # an SM draws twice its share of DRAM's bandwidth
        assert tiling.stages * tiling.block_m * 128 >= 48 * 1024  # enough on its way to hide DRAM's latency


@pytest.mark.parametrize("size", [(300, 4096, 4096), (512, 6144, 4096), (512, 11008, 4096), (768, 4096, 4096), (1024, 11008, 4096)])
def test_tiles_of_few_waves_fill_the_sms_and_use_pdl(size: tuple[int, int, int]) -> None:
    for tiling in tilings(of("float16", size), top_k=3):
        m, n = (size[1], size[0]) if tiling.swap_ab else size[:2]
        tiles = -(-m // tiling.block_m) * -(-n // tiling.block_n)
        assert tiles / (-(-tiles // 132) * 132) >= 0.95
        assert tiling.pdl


@pytest.mark.parametrize(
    ("ctas", "resident", "is_even"),
    [(128, 1, True), (128, 2, True), (66, 1, True), (172, 3, True), (96, 1, False), (96, 2, False), (172, 2, False), (40, 1, False)],
)
def test_pdl_costs_nothing_where_all_ctas_find_room_beside_the_preceding_kernels_or_none(ctas: int, resident: int, is_even: bool) -> None:
    """132 SMs hold `resident` CTAs each, and the preceding kernel's are there, too."""
    assert (pdl_factor(H200.the_gpu, ctas, resident) == 1.0) == is_even


def test_split_k_is_first_where_tiles_would_leave_most_sms_idle() -> None:
    assert 1 not in {tiling.split_k for tiling in tilings(of("float16", (128, 128, 65536)), top_k=5)}
    assert {tiling.split_k for tiling in tilings(of("float16", (8192, 8192, 8192)), top_k=5)} == {1}


def test_of_few_tiles_of_long_rows_parts_share_k_in_clusters_or_operands() -> None:
    first = tilings(of("float16", (556, 464, 9240), "nn"), top_k=4)
    kinds = {(tiling.split_k > 1, tiling.workspace, tiling.cluster_m * tiling.cluster_n) for tiling in first}
    assert kinds >= {(True, 0, 1), (True, 1, 2)}


@pytest.mark.parametrize(
    ("dtype", "layout", "size", "easier"),
    [
        ("int8", "nn", (512, 512, 512), ("nt", (512, 512, 512))),  # wgmma reads 8-bit operands with k last
        ("float8_e5m2", "nt", (512, 512, 500), ("nt", (512, 512, 512))),
        ("tfloat32", "tn", (512, 512, 512), ("nt", (512, 512, 512))),  # and 32-bit ones, but for operand A
        ("float16", "nn", (512, 1001, 512), ("nn", (512, 1008, 512))),
        ("float16", "nt", (512, 512, 501), ("nt", (512, 512, 512))),
    ],
)
def test_loads_through_registers_take_longer(
    dtype: str, layout: str, size: tuple[int, int, int], easier: tuple[str, tuple[int, int, int]]
) -> None:
    (slow,), (quick,) = (wgmma_matmul.propose(space, H200, 1) for space in (of(dtype, size, layout), of(dtype, easier[1], easier[0])))
    assert slow.predicted_secs > quick.predicted_secs
    assert {tiling.cluster_m * tiling.cluster_n for tiling in tilings(of(dtype, size, layout)) if not tiling.pack} == {1}


@pytest.mark.parametrize(
    ("n", "dtype", "is_skinny", "widths"),
    [
        (20, "float16", False, [8, 16, 24]),
        (20, "float16", True, [24]),  # one tile covers few columns
        (100, "float16", True, [64, 96, 128]),  # two tiles at most
        (40, "int8", False, [8, 16, 32, 48]),  # there is no wgmma of int8 with 40 columns, nor two with 20
        (600, "bfloat16", False, [32, 64, 96, 128, 160, 192, 224, 256]),
    ],
)
def test_widths_of_tiles_reach_from_narrow_ones_to_the_one_that_covers_n(n: int, dtype: str, is_skinny: bool, widths: list[int]) -> None:
    assert block_n_choices(n, dtype, is_skinny=is_skinny) == widths


@pytest.mark.parametrize(
    ("extent", "unit", "ctas", "is_possible"),
    [
        (8, 8, 1, True),
        (256, 8, 2, True),
        (256, 64, 2, True),
        (248, 8, 2, False),  # 31 units are prime: each CTA would load 16 TMA boxes of 8 rows
        (24, 8, 2, True),
    ],
)
def test_ctas_share_tiles_that_few_equal_tma_boxes_cover(extent: int, unit: int, ctas: int, is_possible: bool) -> None:
    assert can_multicast(extent, unit, ctas) == is_possible


# How policies compete


def templates(space: IterSpace, name: str, top_k: int = 20) -> list[str]:
    return [proposal.candidate.template for proposal in gpu_matmul.propose(space, arch(name), top_k)]


def test_gemms_go_to_wgmma_where_it_is_far_ahead() -> None:
    assert set(templates(of("float16", (8192, 8192, 8192)), "h200")) == {"wgmma_matmul"}
    assert set(templates(of("float16", (8192, 8192, 8192)), "a100-80gb")) == {"gpu_matmul_tc"}


def test_policies_that_may_be_as_good_share_the_candidates() -> None:
    assert {"wgmma_matmul", "gpu_matmul_tc"} <= set(templates(of("float16", (512, 64, 512)), "h200"))
    assert {"wgmma_matmul", "gpu_gemv"} <= set(templates(of("float16", (1, 4096, 4096)), "h200"))


def test_the_first_choice_for_wgmma_takes_part() -> None:
    for m, dtype in itertools.product((16, 64, 1024), ("float16", "int8")):
        space = of(dtype, (m, 1024, 1024))
        mixed = [proposal.candidate for proposal in gpu_matmul.propose(space, H200, 20)]
        assert wgmma_matmul.propose(space, H200, 1)[0].candidate in mixed


def test_what_tensor_cores_do_not_take_is_left_to_other_policies() -> None:
    space = matmul((1, 4096, 4096), dtype="float32")
    assert gpu_gemv.propose(space, H200, 5)
    assert gpu_matmul.propose(space, H200, 5) == ()
    assert gpu_matmul.tensor_cores(space, H200, "gpu_gemv") == IS_GEMV or "float32" in gpu_matmul.tensor_cores(space, H200, "gpu_gemv")


@given(size=st.tuples(EXTENTS, EXTENTS, EXTENTS), dtype=st.sampled_from(["float16", "int8"]), name=st.sampled_from(GPUS))
def test_mixed_candidates_are_distinct_and_a_shorter_list_is_the_start_of_a_longer(
    size: tuple[int, int, int], dtype: str, name: str
) -> None:
    space: Any = of(dtype, size)
    proposals = gpu_matmul.propose(space, arch(name), 60)
    assert len({proposal.candidate for proposal in proposals}) == len(proposals)
    assert gpu_matmul.propose(space, arch(name), 20) == proposals[:20]
    assert bool(proposals) >= (gpu_matmul.why_not(space, arch(name)) == "")


def test_a_rival_without_tensor_cores_may_win_by_its_time() -> None:
    space = of("float16", (1, 4096, 4096))
    assert gpu_matmul.tensor_cores(space, H200, "gpu_gemv") == "no schedule for them that was tried is correct and faster"
    assert gpu_matmul.tensor_cores(space, H200, "gpu_matmul_simt") == "no schedule for them that was tried is correct"


@pytest.mark.parametrize("template", ["wgmma_matmul", "gpu_matmul_tc", "gpu_conv2d_tc"])
def test_winners_of_all_their_templates_use_tensor_cores(template: str) -> None:
    assert gpu_matmul.tensor_cores(of("float16", (64, 64, 64)), H200, template) == "used"
    assert gpu_matmul_tc.TEMPLATES[0] in gpu_matmul.TEMPLATES
