"""The policy for convolutions on wgmma: every proposal keeps to what the template takes, and TMA boxes waste little, without TVM."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.iter_spaces import H200, access, arch, matmul

from kerneldecl.model import Axis, Block, IterSpace
from kerneldecl.policies import gpu_matmul, wgmma_conv2d
from kerneldecl.policies.wgmma_conv2d import Tiling

SIDES = st.one_of(st.integers(1, 60), st.sampled_from([7, 14, 28, 56, 112, 224]))
CHANNELS = st.one_of(st.integers(1, 64), st.sampled_from([8, 16, 64, 72, 128, 512, 2048]))


def convolution(outputs: tuple[int, int, int], c: int, f: int, taps: int = 3, stride: int = 1, **other: Any) -> IterSpace:
    """Return a convolution of images that have a margin already."""
    n, h, w = outputs
    extents = {"n": n, "h": h, "w": w, "f": f, "r": taps, "s": taps, "c": c}
    axes = tuple(Axis(name, extent, "reduce" if name in "rsc" else "spatial") for name, extent in extents.items())
    pixels = access("X", axes, other.get("dtype", "float16"), {0: 1}, {1: stride, 4: 1}, {2: stride, 5: 1}, {6: 1})
    weights = access("W", axes, other.get("dtype", "float16"), {4: 1}, {5: 1}, {6: 1}, {3: 1})
    out = access("Y", axes, other.get("accum_dtype", "float32"), {0: 1}, {1: 1}, {2: 1}, {3: 1})
    return IterSpace((Block("conv", axes, (pixels, weights), (out,), 2),), ("X", "W"), ("Y",))


def tilings(space: IterSpace, top_k: int = 1000) -> list[Tiling]:
    return [Tiling(**dict(proposal.candidate.params)) for proposal in wgmma_conv2d.propose(space, H200, top_k)]  # type: ignore[arg-type]


@given(
    outputs=st.tuples(st.sampled_from([1, 2, 32, 128]), SIDES, SIDES),
    c=CHANNELS,
    f=CHANNELS,
    taps=st.sampled_from([1, 3, 5]),
    stride=st.integers(1, 3),
    accum_dtype=st.sampled_from(["float32", "float16"]),
)
def test_every_proposal_keeps_to_what_the_template_takes(
    outputs: tuple[int, int, int], c: int, f: int, taps: int, stride: int, accum_dtype: str
) -> None:
    space = convolution(outputs, c, f, taps, stride, accum_dtype=accum_dtype)
    found = tilings(space)
    assert bool(found) == (wgmma_conv2d.why_not(space, H200) == "")
    assert len(set(found)) == len(found)
    limit = H200.the_gpu.smem_per_block_optin_bytes
    for tiling in found:
        is_pingpong = tiling.kernel_schedule == "pingpong"
        rows = tiling.block_m if is_pingpong else tiling.block_m // tiling.consumers
        assert rows in {64, 128}
        registers = rows * tiling.block_n // (256 if accum_dtype == "float16" else 128)
        assert registers <= {1: 192, 2: 160}[tiling.consumers]
        assert not is_pingpong or (tiling.consumers == 2 and tiling.split_k == 1)
        assert tiling.block_n % 8 == 0
        assert 8 <= tiling.block_n <= 256
        assert math.prod(tiling.box) == (tiling.block_n if tiling.swap_ab else tiling.block_m)
        assert all(side & (side - 1) == 0 for side in tiling.box)
        assert max(tiling.tile_w * stride, tiling.tile_h * stride, tiling.box[0]) <= 256
        assert (tiling.cluster_m, tiling.cluster_n) in {(1, 1), (2, 1), (1, 2)}
        assert tiling.cluster_m * tiling.cluster_n == 1 or tiling.filters % 128 == 0
        assert tiling.split_k == 1 or tiling.cluster_m * tiling.cluster_n == 1
        assert taps * taps * -(-c // 64) % tiling.split_k == 0
        pixels, filters = (tiling.block_n, tiling.block_m) if tiling.swap_ab else (tiling.block_m, tiling.block_n)
        split_k_bytes = tiling.block_m * tiling.block_n * 4 * (tiling.split_k > 1 and not tiling.workspace)
        # Filters that are contiguous are loaded 64 at a time; the weights of one filter lie channel by channel.
        unit = 8 if f == 1 else 64
        assert 2 <= tiling.stages <= 12
        assert tiling.stages * (pixels + -(-filters // unit) * unit) * 128 + split_k_bytes + 1024 <= limit


@pytest.mark.parametrize(("c", "f", "is_copied"), [(64, 64, False), (55, 937, True), (55, 64, True), (64, 3, True), (8, 64, False)])
def test_operands_that_tma_cannot_read_are_copied(c: int, f: int, is_copied: bool) -> None:
    assert {tiling.pack for tiling in tilings(convolution((4, 25, 25), c, f))} == {int(is_copied)}


@pytest.mark.parametrize("side", [56, 28, 14])
def test_boxes_over_images_of_networks_waste_nothing(side: int) -> None:
    for tiling in tilings(convolution((128, side, side), 256, 256), top_k=1):
        covered = [-(-extent // length) * length for extent, length in zip((128, side, side), tiling.box, strict=True)]
        assert math.prod(covered) == 128 * side * side


def test_a_shorter_list_is_the_start_of_a_longer_and_the_quickest_come_first() -> None:
    proposals = wgmma_conv2d.propose(convolution((128, 28, 28), 128, 128), H200, 100)
    assert wgmma_conv2d.propose(convolution((128, 28, 28), 128, 128), H200, 10) == proposals[:10]
    assert [p.predicted_secs for p in proposals] == sorted(p.predicted_secs for p in proposals)


@pytest.mark.parametrize(
    ("space", "reason"),
    [
        (convolution((8, 8, 8), 3, 64), "not a multiple of 8"),
        (convolution((8, 8, 8), 64, 64, stride=9), "stride is larger than TMA's, 8"),
        (convolution((8, 8, 8), 64, 64, dtype="bfloat16", accum_dtype="float16"), "no wgmma of bfloat16 with float16 accumulators"),
        (convolution((8, 8, 8), 64, 64, dtype="int8", accum_dtype="int32"), "filters of int8 do not have k last"),
        (convolution((8, 8, 8), 64, 64, taps=1), "plain GEMM"),
        (matmul((64, 64, 64)), "not a convolution"),
    ],
)
def test_why_a_computation_is_not_taken(space: IterSpace, reason: str) -> None:
    assert reason in wgmma_conv2d.why_not(space, H200)
    assert wgmma_conv2d.propose(space, H200, 20) == ()


def test_convolutions_go_to_wgmma_where_there_is_one() -> None:
    space = convolution((128, 14, 14), 256, 256)
    assert {p.candidate.template for p in gpu_matmul.propose(space, H200, 8)} == {"wgmma_conv2d"}
    assert {p.candidate.template for p in gpu_matmul.propose(space, arch("a100-80gb"), 8)} == {"gpu_matmul_tc"}
