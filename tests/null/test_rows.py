"""For which numbers of rows kernels are tuned beside the declared ones."""

from __future__ import annotations

import itertools

import pytest

from kerneldecl.rows import UNIT, chosen_numbers, considered_numbers, top_k_between
from kerneldecl.tuning.rows import timed_rows

TUNED, UPTO = (1, 16, 128, 1024), 4096
CONSIDERED = considered_numbers(TUNED, UPTO)
EVENLY = chosen_numbers(TUNED, UPTO, {})
ABOVE = {1536, 2048, 3072, 4096}


def test_evenly_spaced_numbers_are_chosen_where_nothing_is_predicted() -> None:
    assert sorted(EVENLY) == [32, 48, 64, 96, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, *sorted(ABOVE)]


@pytest.mark.parametrize(
    ("tuned", "upto", "above"), [((16,), 4096, [64, 256, 1024, 4096]), ((128,), 300, [192, 256]), ((1, 16), 31, []), ((1024,), 1024, [])]
)
def test_few_numbers_follow_the_last_tuned_one(tuned: tuple[int, ...], upto: int, above: list[int]) -> None:
    assert [number for number in considered_numbers(tuned, upto) if number > tuned[-1]] == above


def test_no_number_is_as_good_as_a_tuned_one_or_cuts_a_tile() -> None:
    for tuned in ((1, 16, 100, 1000), (48, 500), (16, 250, 4000)):
        numbers = considered_numbers(tuned, 2 * tuned[-1])
        assert all(number % UNIT == 0 for number in numbers)
        assert min(abs(number - each) / each for number in numbers for each in tuned) > 1 / 16
        assert chosen_numbers(tuned, 2 * tuned[-1], {}) <= {*numbers}


def test_a_number_is_chosen_where_the_predicted_time_rises() -> None:
    """A wave of tiles ends at 192, 384 and 768 rows: kernels for these take as long with fewer."""
    waves = {128: 1, 192: 2, 384: 3, 768: 4, 4096: 5}
    secs = {number: next(secs for end, secs in waves.items() if number <= end) for number in (*CONSIDERED, *TUNED)}
    assert chosen_numbers(TUNED, UPTO, secs) == {192, 384, 768} | ABOVE


def test_a_slower_kernel_of_fewer_rows_is_none() -> None:
    flat = dict.fromkeys((*CONSIDERED, *TUNED), 1.0)
    assert chosen_numbers(TUNED, UPTO, flat | {256: 2.0}) == ABOVE


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_there_are_no_more_kernels_than_of_evenly_spaced_numbers(power: float) -> None:
    chosen = chosen_numbers(TUNED, UPTO, {number: number**power for number in (*CONSIDERED, *TUNED)})
    assert len(chosen) <= len(EVENLY)
    assert max(high / low for low, high in itertools.pairwise(sorted({*TUNED[1:], *chosen}))) < 2.1


def test_tuning_takes_no_more_than_four_candidates_for_three_of_before() -> None:
    """With a kernel for each factor of 1.26 there were 13, of two candidates each, beside the four that are declared."""
    assert 4 * 6 + sum(map(top_k_between, EVENLY)) <= 4 / 3 * (4 * 6 + 13 * 2)


def test_kernels_are_timed_at_their_own_numbers_and_at_round_ones_between() -> None:
    numbers = timed_rows([*TUNED, *EVENLY], UPTO)
    assert {*TUNED, *EVENLY} <= {*numbers}
    assert all(number % 8 == 0 for number in numbers if number > 16)
    assert max(high / low for low, high in itertools.pairwise(numbers[4:])) <= 1.5
    assert len(numbers) <= 45
    assert timed_rows([16, 1024], 4096)[-3:] == [2048, 2816, 4096]
