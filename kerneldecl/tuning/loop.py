"""Owns the loop of a search: policies in turn, each asked until it proposes nothing more or a budget is spent; who wins.

Knows nothing of how candidates are evaluated: tuning, recalling and measuring a bundle differ in that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from kerneldecl.model import Candidate, Trial
from kerneldecl.tuning.budget import Allowance
from kerneldecl.tuning.race import ranking

Result = TypeVar("Result")
Item = TypeVar("Item")
"""What stands for a candidate before it is evaluated: a proposal, or a trial that was built elsewhere."""


class Outcome(NamedTuple):
    """What became of a workload's candidates."""

    trials: list[Trial]
    """Winner first. Where there is none, the first has a failure."""
    tied: int
    """How many others noise cannot tell from the winner."""
    policy: str
    """The policy that proposed the winner; empty where there is none."""
    proposed_by: Mapping[Candidate, str] = MappingProxyType({})
    """The policy that proposed each candidate, where there are several."""
    is_cut: bool = False
    """Whether the search was ended from outside, before its policies and its budget had."""

    def with_trials(self, trials: list[Trial], tied: int) -> Outcome:
        """Return the outcome with other findings on its candidates, winner first."""
        policy = self.proposed_by.get(trials[0].candidate, self.policy) if trials[0].samples else ""
        return self._replace(trials=trials, tied=tied, policy=policy)


class Round(NamedTuple):
    """One policy's part of a search."""

    policy: str
    first: Sequence[Any]
    """What it proposes without knowing any measurement."""
    turn: int = 0
    """Place in the entry's list: of the policies of one turn, the first that has a right candidate decides; every turn is taken."""
    searches: bool = False
    """Whether it is asked again with what was measured."""
    allowance: Allowance | None = None
    """What its own budget leaves; None without one."""
    replaces: bool = False
    """Whether it is asked for others in place of candidates that cannot be built."""


Steps = Generator[None, None, Result]
"""A search that stands after each batch until it is asked for the next one."""


def search(
    rounds: Iterable[Round],
    evaluate: Callable[[Sequence[Item]], list[Trial] | None],
    propose_next: Callable[[Round, Sequence[Trial], Sequence[Trial]], Sequence[Item]] = lambda *_: (),
    allowance: Allowance | None = None,
    finish: Callable[[Round, Sequence[Trial], Sequence[Trial]], None] = lambda *_: None,
) -> Outcome | None:
    """Evaluate candidates until each turn has one that passes verification; return what became of all.

    A policy that searches or replaces is asked again by `propose_next`, which gets the trials of others and the policy's own, until it
    proposes nothing new or a budget is spent; `finish` then gets the same. Return None as soon as `evaluate` does: it cannot tell.
    """
    return ended(steps(rounds, evaluate, propose_next, allowance, finish))


def ended(running: Steps[Result]) -> Result:
    """Return what a search comes to, after all of its batches."""
    while True:
        try:
            next(running)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]  # what the generator returns


def steps(
    rounds: Iterable[Round],
    evaluate: Callable[[Sequence[Item]], list[Trial] | None],
    propose_next: Callable[[Round, Sequence[Trial], Sequence[Trial]], Sequence[Item]],
    allowance: Allowance | None,
    finish: Callable[[Round, Sequence[Trial], Sequence[Trial]], None],
) -> Steps[Outcome | None]:
    """Search as `search` does, batch by batch."""
    passed: list[Trial] = []
    failed: list[Trial] = []
    proposed_by: dict[Candidate, str] = {}
    done_turn = -1
    for part in rounds:
        if part.turn == done_turn:
            continue
        limits = [each for each in (part.allowance, allowance) if each]
        trials = yield from _searched(part, limits, [*passed, *failed], evaluate, propose_next)
        if trials is None:
            return None
        finish(part, [*passed, *failed], trials)
        new = [trial for trial in trials if trial.candidate not in proposed_by]
        proposed_by |= {trial.candidate: part.policy for trial in new}
        if any(trial.samples for trial in trials):
            passed += new
            done_turn = part.turn
        else:
            failed += new
    trials, tied = ranking([*passed, *failed])
    return Outcome(trials, tied, proposed_by[trials[0].candidate] if passed else "", proposed_by)


def _searched(
    part: Round,
    limits: Sequence[Allowance],
    others: Sequence[Trial],
    evaluate: Callable[[Sequence[Item]], list[Trial] | None],
    propose_next: Callable[[Round, Sequence[Trial], Sequence[Trial]], Sequence[Item]],
) -> Steps[list[Trial] | None]:
    """Return the trials of one policy; None where `evaluate` cannot tell."""
    trials: list[Trial] = []
    if any(limit.is_spent() for limit in limits):
        return trials
    waiting: Sequence[Any] = part.first or propose_next(part, others, trials)
    while waiting:
        admitted = functools.reduce(lambda left, limit: limit.admitted(left), limits, waiting)
        if not admitted:
            break
        evaluated = evaluate(admitted)
        if evaluated is None:
            return None
        for limit in limits:
            limit.note(evaluated)
        trials += evaluated
        yield
        waiting = waiting[len(admitted) :]
        if part.replaces and not waiting:
            waiting = propose_next(part, others, trials)
        if not (waiting or part.searches) or any(limit.is_spent() for limit in limits):
            break
        waiting = waiting or propose_next(part, others, trials)
    return trials
