"""Policies for GEMMs and convolutions on the CPU: what they propose, without TVM."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.cpus import AVX2, AVX512
from support.thinned import every

from kerneldecl.model import Access, Arch, Axis, Block, Candidate, Cpu, IterSpace, dtype_bytes
from kerneldecl.policies import cpu_conv2d, cpu_gemv, cpu_matmul
from kerneldecl.policies.cpu.time_model import Work, busiest_share, predicted_secs

NEON = replace(AVX512, cores=4, vector_bytes=16, vector_registers=32, l1d_bytes=64 << 10, l3_bytes=0)
CPUS = pytest.mark.parametrize("cpu", [AVX512, AVX2, NEON], ids=["avx512", "avx2", "neon"])


def arch(cpu: Cpu) -> Arch:
    return Arch("any", "cpu", "", (("kind", "llvm"),), cpu)


def access(operand: str, block_axes: tuple[Axis, ...], *dims: dict[int, int], dtype: str = "float32") -> Access:
    """Build an access from one {axis: coefficient} for each dimension; an axis of extent 1 is left out, as it is a constant."""
    shape = tuple(1 + sum(step * (block_axes[axis].extent - 1) for axis, step in dim.items()) for dim in dims)
    index = tuple(tuple((axis, step) for axis, step in dim.items() if block_axes[axis].extent > 1) for dim in dims)
    return Access(operand, shape, dtype, index)


def matmul(m: int, n: int, k: int, layout: str = "nn", dtype: str = "float32") -> IterSpace:
    axes = (Axis("i", m, "spatial"), Axis("j", n, "spatial"), Axis("k", k, "reduce"))
    a = [{0: 1}, {2: 1}] if layout[0] == "n" else [{2: 1}, {0: 1}]
    b = [{2: 1}, {1: 1}] if layout[1] == "n" else [{1: 1}, {2: 1}]
    reads = access("A", axes, *a, dtype=dtype), access("B", axes, *b, dtype=dtype)
    block = Block("gemm", axes, reads, (access("C", axes, {0: 1}, {1: 1}, dtype=dtype),), 2)
    return IterSpace((block,), ("A", "B"), ("C",))


def conv2d(side: int, c: int, f: int, size: int = 3, stride: int = 1, panel: int = 0) -> IterSpace:
    extents = {"n": 1, "h": side, "w": side, "f": f, "r": size, "s": size, "c": c}
    axes = tuple(Axis(name, extent, "reduce" if name in "rsc" else "spatial") for name, extent in extents.items())
    pixels = access("padded", axes, {0: 1}, {1: stride, 4: 1}, {2: stride, 5: 1}, {6: 1})
    weights = access("W", axes, {4: 1}, {5: 1}, {6: 1}, {3: 1})
    if panel:  # number of the panel and place in it are no affine functions of the channel
        weights = Access("W", (f // panel, *weights.shape[:3], panel), "float32", (None, *weights.index[:3], None))
    block = Block("convolved", axes, (pixels, weights), (access("Y", axes, {0: 1}, {1: 1}, {2: 1}, {3: 1}),), 2)
    return IterSpace((block,), ("X", "W"), ("Y",))


SPACES = [
    (cpu_matmul, matmul(512, 512, 512)),
    (cpu_matmul, matmul(1024, 1024, 1024, "nt")),
    (cpu_matmul, matmul(37, 129, 65, "tn")),
    (cpu_matmul, matmul(1, 129, 4096, "tt")),
    (cpu_matmul, matmul(16, 3, 1, "nt", "float64")),
    (cpu_matmul, matmul(1, 1, 1)),
    (cpu_matmul, matmul(4096, 11008, 4096, "nt", "float16")),
    (cpu_conv2d, conv2d(56, 64, 64)),
    (cpu_conv2d, conv2d(7, 512, 512)),
    (cpu_conv2d, conv2d(112, 3, 64, 7, 2)),
    (cpu_conv2d, conv2d(13, 5, 33)),
    (cpu_conv2d, conv2d(1, 2048, 1000, 1)),
    (cpu_conv2d, conv2d(7, 512, 512, panel=16)),
]
PAIRS = pytest.mark.parametrize(("policy", "space", "cpu"), every(3, SPACES, [AVX512, AVX2, NEON]))


def params(candidate: Candidate) -> dict[str, Any]:
    return dict(candidate.params)


@PAIRS
def test_ranking_is_a_fixed_prefix_of_distinct_candidates(policy: Any, space: IterSpace, cpu: Cpu) -> None:
    few, many = policy.propose(space, arch(cpu), 5), policy.propose(space, arch(cpu), 20)
    assert few
    assert many[:5] == few
    assert policy.propose(space, arch(cpu), 20) == many
    assert len({proposal.candidate for proposal in many}) == len(many) <= 20
    assert {proposal.candidate.template for proposal in many} <= set(policy.TEMPLATES)
    assert many[0].predicted_secs == min(proposal.predicted_secs for proposal in many)


@PAIRS
def test_no_prediction_beats_the_peak(policy: Any, space: IterSpace, cpu: Cpu) -> None:
    block = space.blocks[0]
    flops = block.flops_per_point * math.prod(axis.extent for axis in block.axes)
    floor_secs = flops / cpu.peak_flops_per_s(block.writes[0].dtype)
    assert all(proposal.predicted_secs > floor_secs for proposal in policy.propose(space, arch(cpu), 20))


def accumulators(tile: int, width: int, dtype: str, cpu: Cpu) -> int:
    lanes = cpu.vector_bytes // dtype_bytes(dtype)
    return tile * -(-width // lanes)


@CPUS
@pytest.mark.parametrize(
    "space", [matmul(512, 512, 512), matmul(37, 129, 65, "tn"), matmul(16, 3, 1, "nt", "float64"), matmul(16, 512, 512, "nt")]
)
def test_matmul_tiles_fit_registers_and_blocks(space: IterSpace, cpu: Cpu) -> None:
    m, n, _ = (axis.extent for axis in space.blocks[0].axes)
    for proposal in cpu_matmul.propose(space, arch(cpu), 20):
        tiling = params(proposal.candidate)
        dtype = space.blocks[0].writes[0].dtype
        registers = accumulators(tiling["tile_m"], tiling["tile_n"], dtype, cpu)
        assert (tiling["tile_m"] * tiling["tile_n"] if proposal.candidate.template == "cpu_dot" else registers) < cpu.vector_registers
        for extent, tile, block in ((m, tiling["tile_m"], tiling["block_m"]), (n, tiling["tile_n"], tiling["block_n"])):
            assert block % tile == 0
            assert -(-extent // tile) * tile % block == 0


@CPUS
@pytest.mark.parametrize("space", [conv2d(56, 64, 64), conv2d(7, 512, 512), conv2d(13, 5, 33)])
def test_conv2d_tiles_divide_the_image_and_fit_registers(space: IterSpace, cpu: Cpu) -> None:
    _, h, w, f, *_ = (axis.extent for axis in space.blocks[0].axes)
    for proposal in cpu_conv2d.propose(space, arch(cpu), 20):
        tiling = params(proposal.candidate)
        assert accumulators(tiling["tile_w"], tiling["tile_f"], "float32", cpu) < cpu.vector_registers
        assert (w % tiling["tile_w"], h % tiling["block_h"], f % tiling["block_f"], tiling["block_f"] % tiling["tile_f"]) == (0, 0, 0, 0)


@CPUS
@pytest.mark.parametrize("k", [4096, 65536])
def test_blocks_of_long_reductions_fit_l2(k: int, cpu: Cpu) -> None:
    best = params(cpu_matmul.propose(matmul(2048, 2048, k), arch(cpu), 1)[0].candidate)
    inner = best["block_m"] if best["order"] == "nm" else best["block_n"]
    assert inner * (best["block_k"] or k) * 4 <= cpu.l2_bytes


@CPUS
def test_work_is_spread_over_all_cores(cpu: Cpu) -> None:
    best = params(cpu_matmul.propose(matmul(1024, 1024, 1024), arch(cpu), 1)[0].candidate)
    tasks = -(-1024 // best["block_m"]) * -(-1024 // best["block_n"])
    assert busiest_share(tasks, cpu.cores) <= 1.1 / cpu.cores


@CPUS
def test_a_transposed_operand_is_packed_or_read_along_its_rows(cpu: Cpu) -> None:
    for proposal in cpu_matmul.propose(matmul(512, 512, 512, "nt"), arch(cpu), 20):
        assert proposal.candidate.template == "cpu_dot" or params(proposal.candidate)["pack_n"]


@CPUS
def test_few_rows_of_a_transposed_operand_are_not_worth_packing(cpu: Cpu) -> None:
    best = cpu_matmul.propose(matmul(4, 1024, 1024, "nt"), arch(cpu), 1)[0]
    assert best.candidate.template == "cpu_dot"


def test_the_slowest_level_of_the_machine_sets_the_time() -> None:
    work = Work(compute_cycles=3.5e6, l2_bytes=1e6, l3_bytes=1e6, dram_bytes=1e6, parallel_regions=2)
    assert predicted_secs(AVX512, work) == pytest.approx(1e-3 + 2 * 5e-6)
    assert predicted_secs(AVX512, replace(work, dram_bytes=3e8)) == pytest.approx(1e-2 + 2 * 5e-6)
    grown: list[Callable[[Work], Work]] = [
        lambda w: replace(w, l2_bytes=1e12),
        lambda w: replace(w, l3_bytes=1e12),
        lambda w: replace(w, compute_cycles=1e12),
    ]
    assert all(predicted_secs(AVX512, more(work)) > predicted_secs(AVX512, work) for more in grown)


def test_other_functions_get_no_proposal() -> None:
    axes = (Axis("i", 8, "spatial"), Axis("k", 8, "reduce"))
    row_sums = Block("row_sums", axes, (access("X", axes, {0: 1}, {1: 1}),), (access("Y", axes, {0: 1}),), 1)
    space = IterSpace((row_sums,), ("X",), ("Y",))
    gemm, convolution = matmul(8, 8, 8), conv2d(8, 8, 8)
    twice = replace(gemm, blocks=gemm.blocks * 2)
    assert cpu_matmul.propose(space, arch(AVX512), 20) == cpu_conv2d.propose(space, arch(AVX512), 20) == ()
    assert cpu_matmul.propose(twice, arch(AVX512), 20) == ()
    assert cpu_matmul.propose(convolution, arch(AVX512), 20) == ()
    assert cpu_conv2d.propose(gemm, arch(AVX512), 20) == ()


@CPUS
@pytest.mark.parametrize("panel", [4, 16, 48])
def test_register_tiles_are_whole_panels_and_weights_in_panels_are_not_packed(panel: int, cpu: Cpu) -> None:
    proposals = cpu_conv2d.propose(conv2d(14, 32, 96, panel=panel), arch(cpu), 100)
    assert proposals
    for tiling in (params(proposal.candidate) for proposal in proposals):
        assert not tiling["pack_f"]
        assert max(tiling["tile_f"], panel) % min(tiling["tile_f"], panel) == 0


@CPUS
def test_panels_are_predicted_to_be_faster_where_rows_of_weights_lie_far_apart(cpu: Cpu) -> None:
    rows, panels = (cpu_conv2d.propose(conv2d(7, 512, 512, panel=panel), arch(cpu), 1)[0] for panel in (0, 16))
    assert panels.predicted_secs < rows.predicted_secs


@CPUS
def test_one_row_by_a_matrix_with_contiguous_columns_is_a_gemv(cpu: Cpu) -> None:
    for k in (1, 7, 2048):
        assert cpu_matmul.propose(matmul(1, 1000, k), arch(cpu), 5) == ()
        assert cpu_gemv.propose(matmul(1, 1000, k), arch(cpu), 5)
    assert cpu_matmul.propose(matmul(1, 1000, 2048, "nt"), arch(cpu), 5), "rows of the matrix are contiguous along k"
    assert cpu_matmul.propose(matmul(2, 1000, 2048), arch(cpu), 5), "the matrix is used twice"
