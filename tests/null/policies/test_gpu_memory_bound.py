"""The GPU's time model, and what policies for memory-bound kernels propose of it, without TVM."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.memory_bound import Streams, axes
from support.thinned import every

import kerneldecl
from kerneldecl.model import Access, Block, Candidate, IterSpace
from kerneldecl.plugins.load import load_arch
from kerneldecl.policies import gpu_elementwise, gpu_fallback, gpu_gemv, gpu_reduce, gpu_rowwise, gpu_split_rows, gpu_window
from kerneldecl.policies.gpu.column_waits import Turns, rest_waits
from kerneldecl.policies.gpu.time_model import (
    Work,
    access_widths,
    busiest_share,
    launch_secs,
    load_rounds,
    occupancy,
    predicted_secs,
    waves,
)

STANDARD = Path(kerneldecl.__file__).parent / "archs"
GPUS = {file.stem: arch for file in sorted(STANDARD.glob("*.toml")) if (arch := load_arch(STANDARD, file.stem)).gpu}
H200 = GPUS["h200"]

SPACES = Streams("float16")
add, transpose, row_sum, column_sum = SPACES.add, SPACES.transpose, SPACES.row_sum, SPACES.column_sum
softmax, gemv, matmul, access = SPACES.softmax, SPACES.gemv, SPACES.matmul, SPACES.access

Make = Callable[[int, int], IterSpace]


def pool(rows: int, channels: int) -> IterSpace:
    ijk = axes({"i": rows, "j": channels}, {"k": 3})
    window = Access("X", (2 * rows + 1, channels), "float16", (((0, 2), (2, 1)), ((1, 1),) if channels > 1 else ()))
    return IterSpace((Block("Y", ijk, (window,), (access("Y", ijk, 0, 1),), 1),), ("X",), ("Y",))


SUITED: list[tuple[ModuleType, Make]] = [
    (gpu_elementwise, add),
    (gpu_elementwise, transpose),
    (gpu_reduce, row_sum),
    (gpu_reduce, column_sum),
    (gpu_window, pool),
    (gpu_rowwise, softmax),
    (gpu_gemv, gemv),
    (gpu_fallback, matmul),
]


EXTENTS = st.integers(1, 80) | st.integers(1, 1 << 20) | st.sampled_from([127, 1023, 4099, 1 << 14, 1 << 20])


@pytest.mark.parametrize(("policy", "make"), SUITED, ids=[make.__name__ for _, make in SUITED])
@given(name=st.sampled_from(sorted(GPUS)), rows=EXTENTS, columns=EXTENTS)
def test_every_candidate_fits_every_gpu(policy: ModuleType, make: Make, name: str, rows: int, columns: int) -> None:
    gpu = GPUS[name].the_gpu
    proposals = policy.propose(make(rows, columns), GPUS[name], 1000)
    for proposal in proposals:
        params: dict[str, Any] = dict(proposal.candidate.params)
        assert params["threads"] * params.get("rows", 1) <= gpu.max_threads_per_block
        assert 2 * params.get("width", 1) <= 16
        height, width = params.get("tile", (0, 0)) if isinstance(params.get("tile"), tuple) else (0, 0)
        assert 2 * (height + 1) * width <= gpu.smem_per_block_bytes
        assert math.isfinite(proposal.predicted_secs)


RANKED_SIZES = [(2, 2), (3, 7), (64, 100), (2, 4099), (4096, 4096)]
RANKED_ON = ["t4", "a100-80gb", "l4", "rtx-4090", "h200", "b200"]


@pytest.mark.parametrize(
    ("policy", "make", "size", "name"),
    every(7, SUITED, [(size,) for size in RANKED_SIZES], RANKED_ON),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_proposals_are_ranked_distinct_and_repeatable(policy: ModuleType, make: Make, name: str, size: tuple[int, int]) -> None:
    space, arch = make(*size), GPUS[name]
    twenty = policy.propose(space, arch, 20)
    assert 0 < len(twenty) <= 20
    assert len({proposal.candidate for proposal in twenty}) == len(twenty)
    assert {proposal.candidate.template for proposal in twenty} <= set(policy.TEMPLATES)
    assert all(math.isfinite(proposal.predicted_secs) and proposal.predicted_secs > 0 for proposal in twenty)
    assert policy.propose(space, arch, 5) == twenty[:5]
    assert policy.propose(space, arch, 20) == twenty
    assert all(Candidate.from_json(proposal.candidate.to_json()) == proposal.candidate for proposal in twenty)
    for proposal in twenty:
        params = dict(proposal.candidate.params)
        rows = params.get("rows", 1)
        assert isinstance(rows, int)
        assert isinstance(params["threads"], int)
        assert rows * params["threads"] <= arch.the_gpu.max_threads_per_block


@pytest.mark.parametrize(
    ("policy", "make"), [pair for pair in SUITED if pair[0] is not gpu_fallback], ids=lambda value: getattr(value, "__name__", "")
)
def test_large_functions_move_16_bytes_a_thread_first(policy: ModuleType, make: Make) -> None:
    """But for sums of columns, of which 8 bytes a thread took 0.93 of the time and less (global pool of 128 x 7 x 7 x 2048, H200)."""
    first, *_ = policy.propose(make(4096, 4096), H200, 20)
    assert dict(first.candidate.params)["width"] in ({4, 8} if make is column_sum and policy is gpu_reduce else {8})


def test_few_long_rows_have_many_threads_each() -> None:
    """They leave most of a GPU idle, so that what one thread does alone counts: on an H200 64 threads take nearly twice as long as 512."""
    first, *_ = gpu_rowwise.propose(softmax(128, 4096), H200, 20)
    assert dict(first.candidate.params)["threads"] >= 256


def test_many_short_rows_are_stored_by_several_lanes() -> None:
    """Single threads leave most of each sector that they store: 213852 rows of 23 float16 took 63 to 74 us so, 10 with 8 lanes (H200)."""
    proposals = gpu_rowwise.propose(softmax(213852, 23), H200, 1000)
    secs: dict[int, float] = {}
    for each in proposals:
        secs.setdefault(int(str(dict(each.candidate.params)["threads"])), each.predicted_secs)
    assert secs[1] > 3 * secs[8]
    assert int(str(dict(proposals[0].candidate.params)["threads"])) >= 4


def test_few_rows_are_cut_into_chunks_first() -> None:
    first, *_ = gpu_reduce.propose(row_sum(4, 1 << 20), H200, 20)
    assert dict(first.candidate.params)["chunks"] != 1


@pytest.mark.parametrize(
    ("steps", "unroll", "is_narrow", "waits"),
    [
        *(
            (22, 2, True, 2),
            (39, 4, True, 6),
            (39, 8, True, 4),
            (39, 16, True, 20),
            (39, 2, True, 38),
            (43, 16, True, 13),
            (153, 4, True, 153),
        ),
        *((14, 1, False, 14), (22, 2, False, 12), (22, 8, False, 8), (39, 4, False, 20), (39, 8, False, 10), (43, 2, False, 43)),
    ],
)
def test_rows_that_are_no_whole_turns_keep_loads_apart_as_in_sass(steps: int, unroll: int, is_narrow: bool, waits: int) -> None:
    """Counted in the SASS of sums by 8 or 16 threads a column (nvcc 13.0, sm_90a): how often a load's result is awaited before others."""
    turns = Turns(rows=16, unroll=unroll, steps=steps, are_whole=False, chunks=1, access_bytes=2 if is_narrow else 4)
    assert abs(rest_waits(turns, is_narrow=is_narrow) + 1 - waits) <= max(5, waits // 2)


def test_odd_rows_are_cut_so_that_loads_are_in_flight_together() -> None:
    """Of 611 rows of 8891 bfloat16, tilings with a branch for each load took 19 to 28 us on an H200, others 7.4 to 11."""
    params = [dict(each.candidate.params) for each in gpu_reduce.propose(column_sum(611, 8891), H200, 5)]
    for each in params:
        rows, unroll, chunks = (int(str(each[name])) for name in ("rows", "unroll", "chunks"))
        assert unroll > 2
        assert 611 % chunks == 0 or -(-611 // (rows * chunks)) <= unroll


def test_short_rows_are_cut_so_that_their_loads_are_prefetched() -> None:
    """Loads without bounds, of whole rows: 2651 rows of 7 float32 took 1.03 us by blocks of 241 and 1.20 to 1.26 by others on an H200."""
    first, *_ = gpu_reduce.propose(Streams("float32").row_sum(2651, 7), H200, 20)
    params = dict(first.candidate.params)
    assert 2651 % int(str(params["rows"])) == 0
    assert 1 < int(str(params["threads"])) <= 4


def test_reductions_without_windows_and_with_large_windows_are_left_to_others() -> None:
    assert gpu_window.propose(column_sum(4096, 4096), H200, 20) == ()
    assert gpu_window.propose(gemv(64, 64), H200, 20) == ()
    space = pool(64, 64)
    block = replace(space.blocks[0], axes=axes({"i": 64, "j": 64}, {"k": 65}))
    assert gpu_window.propose(replace(space, blocks=(block,)), H200, 20) == ()


def test_no_policy_predicts_less_than_memory_allows() -> None:
    nbytes = 3 * 2 * 4096 * 4096
    gpu = H200.the_gpu
    assert all(proposal.predicted_secs >= nbytes / gpu.dram_bytes_per_s for proposal in gpu_elementwise.propose(add(4096, 4096), H200, 20))


def test_occupancy_is_bound_by_each_resource_in_turn() -> None:
    gpu = H200.the_gpu
    assert occupancy(gpu, 256, 32, 0) == gpu.max_threads_per_sm // 256
    assert occupancy(gpu, 32, 16, 0) == gpu.max_blocks_per_sm
    assert occupancy(gpu, 256, 128, 0) == gpu.registers_per_sm // (128 * 256)
    assert occupancy(gpu, 128, 32, 100 << 10) == 2
    assert occupancy(gpu, 128, 32, gpu.smem_per_block_optin_bytes) == 1
    assert occupancy(gpu, 128, 32, gpu.smem_per_block_optin_bytes + 1) == 0
    assert occupancy(gpu, 2048, 16, 0) == 0
    assert occupancy(gpu, 1024, 128, 0) == 0


def test_waves_count_fillings_of_the_whole_gpu() -> None:
    gpu = H200.the_gpu
    assert waves(gpu, Work(blocks=gpu.sm_count * 8, threads=256)) == 1.0
    assert waves(gpu, Work(blocks=gpu.sm_count * 4, threads=256)) == 0.5
    assert math.isinf(waves(gpu, Work(blocks=1, threads=4096)))


def test_a_partial_last_wave_costs_a_whole_one() -> None:
    gpu = H200.the_gpu
    even = Work(blocks=gpu.sm_count, threads=256, flops=1e12, flops_per_s=1e14)
    odd = even._replace(blocks=gpu.sm_count + 1)
    assert busiest_share(gpu, even) == 1.0
    assert predicted_secs(gpu, odd) > 1.9 * predicted_secs(gpu, even)


def test_time_is_that_of_the_slowest_roof_and_the_launch() -> None:
    gpu = H200.the_gpu
    work = Work(blocks=gpu.sm_count * 64, threads=256, dram_bytes=gpu.dram_bytes_per_s, l2_bytes=1.0, flops=1.0)
    assert predicted_secs(gpu, work) == pytest.approx(1.0 + gpu.launch_secs)


@pytest.mark.parametrize(("extent", "element", "want"), [(1024, 2, [8, 4]), (10, 2, [2, 1]), (7, 4, [1]), (64, 1, [16, 8]), (4, 8, [2, 1])])
def test_widths_divide_the_extent_and_fit_16_bytes(extent: int, element: int, want: list[int]) -> None:
    assert access_widths(extent, element) == want


@pytest.mark.parametrize(
    ("loads", "access_bytes", "bounded_turns", "want"),
    [(4, 16, 0, 1), (16, 16, 0, 4), (16, 2, 0, 1), (32, 2, 0, 2), (24, 2, 6, 2), (47, 2, 12, 12), (185, 2, 47, 47), (0, 2, 0, 1)],
)
def test_threads_wait_as_often_as_the_sass_of_such_loops_does(loads: int, access_bytes: int, bounded_turns: int, want: int) -> None:
    assert load_rounds(loads, access_bytes, bounded_turns) == want


def test_odd_rows_of_a_gemv_have_enough_threads_for_few_loads_each() -> None:
    first = dict(gpu_gemv.propose(gemv(457, 1673), H200, 20)[0].candidate.params)
    assert first["width"] == 1
    assert int(first["threads"]) >= 256


def test_short_odd_rows_share_a_warp() -> None:
    first = dict(gpu_reduce.propose(row_sum(86604, 61), H200, 20)[0].candidate.params)
    assert (first["threads"], first["width"]) == (8, 1)


def test_long_odd_rows_are_read_in_aligned_vectors_first() -> None:
    first = gpu_split_rows.propose(row_sum(152, 188661), H200, 20)[0].candidate
    assert (first.template, dict(first.params)["width"]) == ("gpu_split_rows", 8)


def test_launches_are_early_where_gpus_have_programmatic_dependent_launch() -> None:
    ampere = GPUS["a100-80gb"].the_gpu
    assert launch_secs(H200.the_gpu) < H200.the_gpu.launch_secs
    assert launch_secs(ampere) == ampere.launch_secs
