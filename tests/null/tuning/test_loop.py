"""Owns the tests of a search's loop: whose turn it is, what a budget leaves, who is asked again and with what.

Knows nothing of how candidates are measured: their times are written down.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kerneldecl.model import Candidate, Proposal, Trial
from kerneldecl.tuning.budget import AT_ONCE, Allowance
from kerneldecl.tuning.loop import Round, search

SECS = {"a": 4e-6, "b": 3e-6, "c": 2e-6, "d": 1e-6}


def proposed(names: str) -> tuple[Proposal, ...]:
    return tuple(Proposal(Candidate.of(name, {}), 1e-6) for name in names)


def name_of(trial: Trial) -> str:
    return trial.candidate.template


def trial_of(proposal: Proposal) -> Trial:
    name = proposal.candidate.template
    if name not in SECS:
        return Trial(proposal.candidate, 1e-6, failure="wrong")
    return Trial(proposal.candidate, 1e-6, code_digest=name, error=0.0, samples=(SECS[name],) * 5)


class Measured:
    """Evaluates by the table and remembers what it was given."""

    def __init__(self) -> None:
        self.batches: list[str] = []

    def __call__(self, proposals: Sequence[Proposal]) -> list[Trial]:
        self.batches.append("".join(proposal.candidate.template for proposal in proposals))
        return list(map(trial_of, proposals))


def test_every_turn_is_taken_and_of_the_policies_of_one_turn_the_first_that_has_a_right_candidate_decides() -> None:
    evaluate = Measured()
    rounds = [
        Round("wrong", proposed("x")),
        Round("first", proposed("a")),
        Round("second", proposed("d")),
        Round("next", proposed("bc"), 1),
    ]
    outcome = search(rounds, evaluate)
    assert outcome is not None
    assert evaluate.batches == ["x", "a", "bc"]
    assert (outcome.policy, name_of(outcome.trials[0])) == ("next", "c")
    assert {name_of(trial) for trial in outcome.trials} == {"x", "a", "b", "c"}


def test_a_policy_that_searches_gets_what_others_have_measured_and_its_own_and_is_told_its_end() -> None:
    asked: list[tuple[str, str]] = []
    told: list[str] = []

    def propose_next(part: Round, others: Sequence[Trial], trials: Sequence[Trial]) -> tuple[Proposal, ...]:
        if not part.searches:
            return ()
        asked.append(("".join(map(name_of, others)), "".join(map(name_of, trials))))
        return proposed("bcd"[len(trials) : len(trials) + 1])

    def finish(part: Round, _: Sequence[Trial], trials: Sequence[Trial]) -> None:
        told.append(f"{part.policy} {''.join(map(name_of, trials))}")

    rounds = [Round("first", proposed("a")), Round("tuner", (), 1, searches=True)]
    outcome = search(rounds, Measured(), propose_next, finish=finish)
    assert outcome is not None
    assert asked == [("a", ""), ("a", "b"), ("a", "bc"), ("a", "bcd")]
    assert told == ["first a", "tuner bcd"]
    assert outcome.policy == "tuner"


def test_a_candidate_of_two_policies_is_the_first_ones() -> None:
    outcome = search([Round("first", proposed("ad")), Round("second", proposed("d"), 1)], Measured())
    assert outcome is not None
    assert outcome.policy == "first"
    assert sorted(map(name_of, outcome.trials)) == ["a", "d"]


def test_trials_of_a_policy_and_of_the_whole_search_are_both_limits() -> None:
    evaluate = Measured()
    rounds = [Round("one", proposed("abcd"), 0, allowance=Allowance((("trials", 3.0),))), Round("two", proposed("abcd"), 1)]
    search(rounds, evaluate, allowance=Allowance((("trials", 4.0),)))
    assert evaluate.batches == ["abc", "a"]


def test_a_search_ends_as_soon_as_its_best_is_near_enough_to_the_peak() -> None:
    evaluate = Measured()

    def one_more(_: Round, __: Sequence[Trial], trials: Sequence[Trial]) -> tuple[Proposal, ...]:
        return proposed("abcd"[len(trials) :][:1])

    search([Round("tuner", (), searches=True)], evaluate, one_more, Allowance((("stop_at", 0.5),), least_secs=1e-6))
    assert evaluate.batches == ["a", "b", "c"]  # 1 us is half of what c takes


def test_seconds_end_a_search_between_batches() -> None:
    now = iter([0.0, 1.0, 9.0, 11.0, 12.0])
    allowance = Allowance((("seconds", 10.0),), clock=lambda: next(now))
    many = tuple(range(3 * AT_ONCE))
    assert len(allowance.admitted(many)) == AT_ONCE
    assert len(allowance.admitted(many)) == AT_ONCE
    assert not allowance.admitted(many)


@pytest.mark.parametrize("budget", [(), (("trials", 100.0),)])
def test_without_a_limit_in_time_all_candidates_are_measured_together(budget: tuple[tuple[str, float], ...]) -> None:
    assert len(Allowance(budget).admitted(tuple(range(50)))) == 50


def test_what_cannot_be_told_ends_the_search() -> None:
    assert search([Round("first", proposed("a"))], lambda _: None) is None
