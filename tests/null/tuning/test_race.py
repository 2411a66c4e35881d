"""Owns the tests of the race: who is timed how often, who wins, and what becomes of those that fail.

Knows nothing of kernels: a sampler hands out seconds.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from kerneldecl.model import Candidate, Trial
from kerneldecl.store.keys import digest
from kerneldecl.tuning.race import BUDGETS, NOISE, race, ranking

SECS = st.floats(1e-6, 1.0)
ROUNDS = BUDGETS["cpu"].rounds


def verified(name: str) -> Trial:
    return Trial(Candidate.of(name, {}), 1e-3, code_digest=digest(name.encode()), error=1e-6)


def timed(name: str, samples: list[float]) -> Trial:
    return dataclasses.replace(verified(name), samples=tuple(samples))


def name_of(measurement: Trial) -> str:
    return measurement.candidate.template


@dataclasses.dataclass
class Sampler:
    """Hands out the true time of each candidate, and writes down who was asked for how many calls."""

    secs: dict[str, float]
    asked: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    fails: frozenset[str] = frozenset()

    def __call__(self, measurement: Trial, calls: int) -> list[float] | str:
        self.asked.append((name_of(measurement), calls))
        return "crashed" if name_of(measurement) in self.fails else [self.secs[name_of(measurement)]]

    def field(self) -> list[tuple[Trial, float]]:
        return [(verified(name), secs) for name, secs in self.secs.items()]


def test_the_fastest_wins_by_its_median() -> None:
    steady, lucky = timed("steady", [2.0, 2.0, 2.0]), timed("lucky", [1.0, 3.0, 3.0, 3.0, 3.0])
    ranked, tied = ranking([lucky, steady])
    assert [name_of(m) for m in ranked] == ["steady", "lucky"]
    assert tied == 0


def test_everyone_keeps_a_time() -> None:
    sampler = Sampler({"a": 1e-3, "b": 2e-3, "c": 1e-1})
    raced = race(sampler.field(), sampler)
    assert {name_of(m): m.run_secs for m in raced} == {"a": 1e-3, "b": 2e-3, "c": 1e-1}


def test_slow_ones_drop_out() -> None:
    """Far behind after the first run: not even sampled. Behind after a round: sampled no more."""
    sampler = Sampler({"best": 1e-3, "near": 1.05e-3, "behind": 1.4e-3, "far": 2e-3, "hopeless": 9e-3})
    race(sampler.field(), sampler)
    counts = Counter(name for name, _ in sampler.asked)
    first, second, third = (round_.samples for round_ in ROUNDS)
    assert counts == {"best": first + second + third, "near": first + second + third, "behind": first + second, "far": first}


def test_a_round_takes_the_fastest_few() -> None:
    sampler = Sampler({f"c{i:02}": 1e-4 * (1 + i / 150) for i in range(30)})
    race(sampler.field(), sampler)
    counts = Counter(name for name, _ in sampler.asked)
    first, second, third = (round_.most for round_ in ROUNDS)
    assert [counts[f"c{i:02}"] for i in (0, third - 1)] == [sum(round_.samples for round_ in ROUNDS)] * 2
    assert len(counts) == first
    assert sum(count > ROUNDS[0].samples for count in counts.values()) == second


def test_candidates_take_turns() -> None:
    """In every other one backwards: who follows a kernel that heats the GPU up is not always the same."""
    sampler = Sampler({"a": 1e-3, "b": 1.01e-3, "c": 1.02e-3})
    race(sampler.field(), sampler)
    turns = [name for name, _ in sampler.asked]
    for rules in ROUNDS:
        expected = [name for turn in range(rules.samples) for name in ("abc" if turn % 2 == 0 else "cba")]
        assert turns[: len(expected)] == expected
        turns = turns[len(expected) :]
    assert not turns


def test_a_sample_is_long_enough_for_the_clock() -> None:
    sampler = Sampler({"fast": 1e-6, "slow": 1e-2})
    race([sampler.field()[0]], sampler)
    race([sampler.field()[1]], sampler)
    calls = dict(sampler.asked)
    assert calls["fast"] * 1e-6 >= BUDGETS["cpu"].sample_secs * 0.999
    assert calls["slow"] == 1


def test_slow_kernels_are_sampled_less_often() -> None:
    sampler = Sampler({"slow": 2.0})
    race(sampler.field(), sampler)
    assert len(sampler.asked) == 3 * len(ROUNDS)


def test_slow_kernels_of_a_gpu_are_ranked_by_their_first_run_and_the_best_by_three_samples() -> None:
    sampler = Sampler({f"c{i:02}": 0.04 * (1 + i / 100) for i in range(20)})
    raced = race(sampler.field(), sampler, BUDGETS["cuda"])
    counts = Counter(name for name, _ in sampler.asked)
    _, second, third = BUDGETS["cuda"].rounds
    assert len(counts) == second.most
    assert Counter(counts.values()) == {second.least: second.most - third.most, second.least + third.least: third.most}
    assert {name_of(m): m.run_secs for m in raced} == sampler.secs


def test_short_kernels_of_a_gpu_are_sampled_in_every_round() -> None:
    sampler = Sampler({f"c{i:02}": 1e-5 * (1 + i / 150) for i in range(20)})
    race(sampler.field(), sampler, BUDGETS["cuda"])
    counts = Counter(name for name, _ in sampler.asked)
    assert (counts["c00"], counts["c07"], counts["c19"]) == (43, 13, 3)
    assert sampler.asked[0] == ("c00", 100), "as many calls as take a millisecond"


def test_a_single_candidate_is_raced_too() -> None:
    sampler = Sampler({"only": 1e-3})
    (measured,) = race(sampler.field(), sampler)
    assert len(measured.samples) == sum(round_.samples for round_ in ROUNDS)
    assert ranking([measured]) == ([measured], 0)


def test_nobody_is_raced_where_nobody_passed() -> None:
    assert race([], Sampler({})) == []
    failed = dataclasses.replace(verified("wrong"), failure="wrong")
    assert ranking([failed]) == ([failed], 0)


def test_one_that_fails_in_the_race_is_kept_with_its_reason_and_asked_no_more() -> None:
    sampler = Sampler({"good": 1e-3, "bad": 1e-3}, fails=frozenset({"bad"}))
    raced = race(sampler.field(), sampler)
    by_name = {name_of(m): m for m in raced}
    assert by_name["bad"].failure == "crashed"
    assert by_name["bad"].samples == ()
    assert Counter(name for name, _ in sampler.asked)["bad"] == 1
    ranked, _ = ranking(raced)
    assert [name_of(m) for m in ranked] == ["good", "bad"]


def test_one_that_fails_late_loses_its_samples() -> None:
    sampler = Sampler({"good": 1e-3, "bad": 1e-3})
    calls: Iterator[int] = iter(range(1000))

    def fails_at_twenty(measurement: Trial, count: int) -> list[float] | str:
        return "hung" if name_of(measurement) == "bad" and next(calls) >= 9 else sampler(measurement, count)

    bad = race(sampler.field(), fails_at_twenty)[1]
    assert (bad.samples, bad.failure) == ((), "hung")


def test_the_same_candidate_twice_is_two_runners() -> None:
    """Equal values, as two proposals of one candidate are, must not be mixed up."""
    sampler = Sampler({"a": 1e-3})
    assert len(race([*sampler.field(), *sampler.field()], sampler)) == 2


def test_among_equals_the_first_in_the_order_of_the_policy_wins() -> None:
    near, fastest, slow = timed("near", [1.004, 1.004]), timed("fastest", [1.0, 1.0]), timed("slow", [1.1, 1.1])
    ranked, tied = ranking([slow, near, fastest])
    assert ([name_of(m) for m in ranked], tied) == (["near", "fastest", "slow"], 1)
    assert name_of(ranking([fastest, near, slow])[0][0]) == "fastest"


def test_one_that_is_slower_beyond_noise_does_not_win_by_its_place() -> None:
    assert name_of(ranking([timed("first", [1.02, 1.02]), timed("second", [1.0, 1.0])])[0][0]) == "second"


def test_noisy_samples_tie_where_quiet_ones_do_not() -> None:
    noisy = [timed("a", [1.0, 1.1, 0.9, 1.05, 0.95]), timed("b", [1.07, 1.02, 0.97, 0.92, 1.12])]
    quiet = [timed("a", [1.0] * 5), timed("b", [1.02] * 5)]
    assert (ranking(noisy)[1], ranking(quiet)[1]) == (1, 0)


def test_noise_that_meets_both_is_no_tie() -> None:
    """A clock that changes between turns: in each of them one is slower by two hundredths."""
    turns = [1.0, 1.1, 0.9, 1.05, 0.95]
    ranked, tied = ranking([timed("first", [turn * 1.02 for turn in turns]), timed("second", turns)])
    assert ([name_of(m) for m in ranked], tied) == (["second", "first"], 0)


def test_who_dropped_out_while_the_clock_was_high_does_not_win() -> None:
    final, out = timed("final", [1.0] * 3 + [1.2] * 20), timed("out", [1.01] * 3)
    assert [name_of(m) for m in ranking([out, final])[0]] == ["final", "out"]


def test_a_slow_one_that_was_raced_alone_in_a_later_build_does_not_win() -> None:
    """Builds before it raced the others: fewer samples say nothing of where they came."""
    alone, fast, near = timed("alone", [26.0] * 17), timed("fast", [21.2] * 8), timed("near", [21.7] * 8)
    ranked, tied = ranking([alone, near, fast])
    assert ([name_of(m) for m in ranked], tied) == (["fast", "near", "alone"], 0)


def test_of_many_equally_fast_ones_the_same_come_to_the_final_whatever_their_noise() -> None:
    finalists = []
    for shift in (0, 7, 13):
        sampler = Sampler({f"c{i:02}": 1e-5 * (1 + (i + shift) % 20 / 10_000) for i in range(20)})
        raced = race(sampler.field(), sampler, BUDGETS["cuda"])
        most = max(len(m.samples) for m in raced)
        fastest = min(raced, key=lambda m: m.run_secs)
        finalists.append({name_of(m) for m in raced if len(m.samples) == most})
        assert name_of(fastest) in finalists[-1]
    assert len(set.intersection(*finalists)) >= 3


@given(st.lists(SECS, min_size=1, max_size=25))
def test_the_winner_is_the_first_within_noise_of_the_fastest(times: list[float]) -> None:
    sampler = Sampler({f"c{i}": secs for i, secs in enumerate(times)})
    raced = race(sampler.field(), sampler)
    ranked, tied = ranking(raced)
    assert ranked[0].run_secs <= min(times) * (1 + NOISE) * 1.0001
    assert sorted(map(name_of, ranked)) == sorted(sampler.secs)
    assert tied == sum(m.run_secs <= min(times) * (1 + NOISE) for m in ranked) - 1
    most = max(len(m.samples) for m in raced)
    assert ranked[0] is next(m for m in raced if m.run_secs <= min(times) * (1 + NOISE) and 2 * len(m.samples) > most)
    assert ranking(race(sampler.field(), sampler))[0] == ranked


@given(st.lists(st.lists(SECS, max_size=9), min_size=1, max_size=12))
def test_ranking_keeps_everyone_fastest_first_and_failed_last(samples: list[list[float]]) -> None:
    measurements = [timed(f"c{i}", several) for i, several in enumerate(samples)]
    ranked, tied = ranking(measurements)
    assert sorted(map(name_of, ranked)) == sorted(map(name_of, measurements))
    times = [m.run_secs for m in ranked if m.samples]
    assert times[1:] == sorted(times[1:])
    assert [bool(m.samples) for m in ranked] == sorted((bool(m.samples) for m in ranked), reverse=True)
    assert 0 <= tied < max(1, len(times))
    for m in ranked[: len(times)]:
        assert m.run_secs == statistics.median(m.samples)
