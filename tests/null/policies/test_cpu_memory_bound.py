"""Policies for memory-bound kernels on the CPU: what they propose, without TVM."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import pytest
from support.cpus import AVX2, AVX512
from support.memory_bound import Streams, axes
from support.thinned import every

from kerneldecl.model import Access, Arch, Block, Candidate, Cpu, IterSpace
from kerneldecl.policies import cpu_elementwise, cpu_fallback, cpu_gemv, cpu_reduce, cpu_rowwise
from kerneldecl.policies.cpu.traffic_secs import Stream, stream_secs
from kerneldecl.policies.shared.traffic import contiguous_axis, moved_bytes

SINGLE = replace(AVX512, cores=1, vector_bytes=16, l3_bytes=0)

SPACES = Streams("float32")
add, transpose, row_sum, column_sum = SPACES.add, SPACES.transpose, SPACES.row_sum, SPACES.column_sum
softmax, gemv, matmul, access = SPACES.softmax, SPACES.gemv, SPACES.matmul, SPACES.access

Make = Callable[[int, int], IterSpace]


def arch(cpu: Cpu) -> Arch:
    return Arch("any", "cpu", "", (("kind", "llvm"),), cpu)


SUITED: list[tuple[ModuleType, Make]] = [
    (cpu_elementwise, add),
    (cpu_elementwise, transpose),
    (cpu_reduce, row_sum),
    (cpu_reduce, column_sum),
    (cpu_rowwise, softmax),
    (cpu_gemv, gemv),
    (cpu_fallback, matmul),
]
PAIRS = pytest.mark.parametrize(("policy", "make"), SUITED, ids=[make.__name__ for _, make in SUITED])
SIZES = [(1, 1), (3, 7), (64, 100), (1, 4099), (4096, 4096)]


@pytest.mark.parametrize(
    ("policy", "make", "size", "cpu"),
    every(3, SUITED, [(size,) for size in SIZES], [AVX512, AVX2, SINGLE]),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_proposals_are_ranked_distinct_and_repeatable(policy: ModuleType, make: Make, cpu: Cpu, size: tuple[int, int]) -> None:
    space = make(*size)
    twenty = policy.propose(space, arch(cpu), 20)
    assert 0 < len(twenty) <= 20
    assert len({proposal.candidate for proposal in twenty}) == len(twenty)
    assert {proposal.candidate.template for proposal in twenty} <= set(policy.TEMPLATES)
    assert all(math.isfinite(proposal.predicted_secs) and proposal.predicted_secs > 0 for proposal in twenty)
    assert policy.propose(space, arch(cpu), 5) == twenty[:5]
    assert policy.propose(space, arch(cpu), 20) == twenty
    assert all(Candidate.from_json(proposal.candidate.to_json()) == proposal.candidate for proposal in twenty)
    if policy is not cpu_fallback:
        assert [p.predicted_secs for p in twenty] == sorted(p.predicted_secs for p in twenty)


@pytest.mark.parametrize(
    ("policy", "make"),
    [
        (cpu_elementwise, softmax),
        (cpu_reduce, add),
        (cpu_reduce, softmax),
        (cpu_reduce, matmul),
        (cpu_rowwise, row_sum),
        (cpu_rowwise, column_sum),
        (cpu_rowwise, add),
        (cpu_gemv, row_sum),
        (cpu_gemv, matmul),
        (cpu_gemv, softmax),
    ],
    ids=lambda value: value.__name__.rpartition(".")[2],
)
def test_other_functions_are_left_to_other_policies(policy: ModuleType, make: Make) -> None:
    assert policy.propose(make(64, 64), arch(AVX512), 20) == ()


@PAIRS
def test_threads_are_started_only_where_they_pay(policy: ModuleType, make: Make) -> None:
    """Starting threads costs more than a small kernel takes, and is nothing beside a large one."""
    small, large = (policy.propose(make(*size), arch(AVX512), 1)[0].candidate for size in ((8, 8), (4096, 4096)))
    assert (dict(small.params)["parallel"], dict(large.params)["parallel"]) == (False, True)


@PAIRS
def test_one_core_is_offered_no_chunks(policy: ModuleType, make: Make) -> None:
    proposed = policy.propose(make(1, 4096), arch(SINGLE), 50)
    assert {dict(proposal.candidate.params).get("chunks", 1) for proposal in proposed} == {1}


def test_few_rows_are_cut_into_chunks_and_many_are_not() -> None:
    def chunks(rows: int) -> set[object]:
        return {dict(p.candidate.params)["chunks"] for p in cpu_reduce.propose(row_sum(rows, 1 << 20), arch(AVX2), 100)}

    assert chunks(1) == {1, 8, 16}
    assert chunks(64) == {1}


def test_rows_computed_together_divide_the_rows() -> None:
    rows = {dict(p.candidate.params)["rows"] for p in cpu_gemv.propose(gemv(6, 512), arch(AVX512), 100)}
    assert rows == {1, 2}


@pytest.mark.parametrize("cores", [2, 16])
def test_columns_are_cut_into_equal_groups(cores: int) -> None:
    """The condition of a partial group would be evaluated in all of them."""
    cpu = replace(AVX512, cores=cores)
    for width in (1000, 4096, 19488):
        for proposal in cpu_reduce.propose(column_sum(128, width), arch(cpu), 6):
            params = dict(proposal.candidate.params)
            columns = params["columns"]
            assert isinstance(columns, int)
            assert width % columns == 0
            assert columns * 8 <= cpu.l1d_bytes


def test_columns_without_equal_groups_are_computed_together_or_by_a_few_vectors() -> None:
    columns = {dict(p.candidate.params)["columns"] for p in cpu_reduce.propose(column_sum(128, 10007), arch(AVX512), 100)}
    assert columns == {10007, 64, 256}


def test_rows_added_up_together_divide_a_chunk() -> None:
    found = [dict(p.candidate.params) for p in cpu_reduce.propose(column_sum(30, 10007), arch(AVX512), 100)]
    assert {params["steps"] for params in found if params["chunks"] == 2} == {3, 1}
    assert {params["steps"] for params in found if params["chunks"] == 1} == {4, 2, 1}


def test_a_scale_per_row_is_no_transpose() -> None:
    ij = axes({"i": 64, "j": 64})
    space = IterSpace(
        (Block("Y", ij, (access("X", ij, 0, 1), access("scale", ij, 0)), (access("Y", ij, 0, 1),), 1),), ("X", "scale"), ("Y",)
    )
    assert all("tile" not in dict(p.candidate.params) for p in cpu_elementwise.propose(space, arch(AVX512), 20))
    assert all("tile" in dict(p.candidate.params) for p in cpu_elementwise.propose(transpose(64, 64), arch(AVX512), 20))


def test_contiguous_axis_looks_past_extents_of_one_and_gives_up_at_an_indirect_index() -> None:
    ij = axes({"i": 8, "j": 1})
    block = Block("Y", ij, (), (), 0)
    assert contiguous_axis(block, access("X", ij, 0, 1)) == 0
    assert contiguous_axis(block, Access("X", (8, 16), "float32", (((0, 1),), ((0, 2),)))) is None
    assert contiguous_axis(block, Access("X", (8, 16), "float32", (((0, 1),), None))) is None


def test_arguments_are_counted_once_and_intermediates_never() -> None:
    assert moved_bytes(softmax(4, 8)) == 2 * 4 * 8 * 4


def test_a_stream_takes_as_long_as_the_slowest_of_compute_and_memory() -> None:
    def secs(nbytes: int, cycles: float, *, is_parallel: bool) -> float:
        return stream_secs(AVX512, Stream(nbytes, cycles, 4), is_parallel=is_parallel)

    assert secs(1 << 10, 7e9, is_parallel=False) == pytest.approx(2.0)  # compute
    assert secs(1 << 10, 7e9, is_parallel=True) == pytest.approx(1.0 + 5e-6)  # on two cores
    assert secs(512 << 10, 0.0, is_parallel=False) == pytest.approx((512 << 10) / 32 / 3.5e9)  # second cache
    assert secs(8 << 20, 0.0, is_parallel=False) == pytest.approx((8 << 20) / 16 / 3.5e9)  # third cache
    assert secs(3 << 30, 0.0, is_parallel=False) == pytest.approx((3 << 30) / 12e9)  # memory, as far as one core can draw it
    assert secs(3 << 30, 0.0, is_parallel=True) == pytest.approx((3 << 30) / 24e9 + 5e-6)
