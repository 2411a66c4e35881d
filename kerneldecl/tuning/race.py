"""Owns how verified candidates are timed against each other and which of them wins.

Knows nothing of processes or kernels: it asks for samples and gets seconds.

Successive halving: everyone gets a few samples, the slow ones drop out, the last four get many. Within a round the
candidates take turns, forwards and backwards by turns, so that a change of clock or load meets all of them. Halving and
racing as in Jamieson and Talwalkar, "Non-stochastic best arm identification", AISTATS 2016.

Candidates come in the order of their policy, best expected first, and where noise hides differences that order decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kerneldecl.model import Trial
from kerneldecl.timing import raced

Sampler = Callable[[Trial, int], "list[float] | str"]
"""Times a candidate: takes it and the calls a sample is made of, returns seconds a call, or why there are none."""


@dataclass(frozen=True)
class Round:
    """One round: who takes part, and how often each is sampled."""

    samples: int
    slowdown: float
    """A candidate slower than the best by more than this factor drops out."""
    most: int
    """Most candidates that take part."""
    least: int = 3
    """Fewest samples, however long they take."""


@dataclass(frozen=True)
class Budget:
    """How much time a device is given to show its differences."""

    rounds: tuple[Round, ...]
    sample_secs: float
    """A sample is as many calls as take this long, so that the clock's own cost does not count."""
    round_secs: float
    """Slow kernels get fewer samples, so that no round takes much longer."""


BUDGETS: Mapping[str, Budget] = {
    "cpu": Budget((Round(3, 4.0, 20), Round(7, 1.5, 8), Round(20, 1.15, 4)), 1e-3, 1.5),
    # A first run on a GPU, with cold caches like the samples, shows which candidates are far behind: a round may be too long for that.
    # Rests are not counted in the seconds of a round: they are as long as the samples. Few launches do not show how kernels get on that
    # follow each other for long: what they leave to be written, and how the next one's blocks find room.
    "cuda": Budget((Round(3, 2.0, 20, least=0), Round(10, 1.2, 8), Round(30, 1.06, 4, least=5)), 1e-3, 0.2),
}
"""Budget by kind of arch."""
_HEATED = Budget((Round(1, 1.5, 20, least=1), Round(3, 1.15, 8), Round(9, 1.06, 4, least=5)), 1e-3, 1.0)
"""Of a GPU whose samples are steady: each comes after the kernel has heated the GPU up for longer than a sample takes."""
NOISE = 0.01
"""Two medians closer than this are one to us. From one H200 to another the ratio of two kernels' times changed by less in nine pairs of
ten, by less than half of it in three of four (those within 5 % of the fastest of 23 entries; `benchmarks/repeat.py --stores`, 2026-11)."""
LUCK = 1.2
"""Ratio of times up to which few samples may show a candidate faster than it is."""


def budget_of(kind: str, timing: str) -> Budget:
    """Return the budget of a race on a kind of arch whose winner is chosen by a timing."""
    return _HEATED if kind == "cuda" and "steady" in raced(kind, timing) else BUDGETS[kind]


def race(verified: Sequence[tuple[Trial, float]], sample: Sampler, budget: Budget = BUDGETS["cpu"]) -> list[Trial]:
    """Return the candidates, each with its samples or a failure. Each comes with the seconds of a first run."""
    candidates = [trial for trial, _ in verified]
    secs = [first for _, first in verified]
    places = list(range(len(candidates)))
    for rules in budget.rounds:
        places = _admitted(places, secs, rules)
        total = sum(max(secs[place], budget.sample_secs) for place in places)
        count = max(rules.least, min(rules.samples, int(budget.round_secs / total))) if places else 0
        for turn in range(count):
            for place in places[:: -1 if turn % 2 else 1]:
                if not candidates[place].failure:
                    candidates[place] = _sampled(candidates[place], secs[place], sample, budget.sample_secs)
        places = [place for place in places if not candidates[place].failure]
        for place in places:
            if candidates[place].samples:
                secs[place] = candidates[place].run_secs
    # Who dropped out before the first round keeps the time of its first run.
    return [m if m.samples or m.failure else replace(m, samples=(first,)) for m, first in zip(candidates, secs, strict=True)]


def _admitted(places: Sequence[int], secs: Sequence[float], rules: Round) -> list[int]:
    """Return who takes part in a round: the fastest, then the others by time, in the policy's order where noise hides differences.

    Of many that are equally fast the same few then come to the final on every run.
    """
    if not places:
        return []
    fastest = min(places, key=lambda place: (secs[place], place))
    limit = rules.slowdown * secs[fastest]

    def rank(place: int) -> tuple[object, ...]:
        return place != fastest, (secs[place] / secs[fastest] - 1) // NOISE, place

    return sorted((place for place in places if secs[place] <= limit), key=rank)[: rules.most]


def _sampled(trial: Trial, expected_secs: float, sample: Sampler, sample_secs: float) -> Trial:
    answer = sample(trial, calls_in(sample_secs, expected_secs))
    if isinstance(answer, str):
        return excluded(trial, answer)
    return replace(trial, samples=(*trial.samples, *answer))


def excluded(trial: Trial, failure: str) -> Trial:
    """Return the trial of a candidate that does not compete any more."""
    return replace(trial, samples=(), timings=(), failure=failure)


def calls_in(sample_secs: float, call_secs: float) -> int:
    """Return of how many calls a sample is made."""
    return max(1, math.ceil(sample_secs / max(call_secs, 1e-7)))


def ranking(trials: Sequence[Trial]) -> tuple[list[Trial], int]:
    """Return all trials, winner first, then by time, failed ones last; and how many tied with the fastest.

    Trials are given in their policy's order. Who came to the final can win. Among those that noise cannot tell from the
    fastest, the first in that order wins: a second run picks the same one, and what a policy knows beyond a race counts.
    """
    timed = _by_time(trials)
    if not timed:
        return list(trials), 0
    winner, *_ = finalists(trials)
    others = [m for m in timed if m is not winner]
    return [winner, *others, *(m for m in trials if not m.samples)], len(tied(trials)) - 1


def finalists(trials: Sequence[Trial]) -> list[Trial]:
    """Return who came to the final and cannot be told from the fastest there, in the order of `trials`: the winner first.

    Trials may be of several builds, each of which raced what the ones before had not: a slow one that was alone has many samples, too.
    """
    timed = _by_time(trials)
    most = max((len(m.samples) for m in timed if m.run_secs <= LUCK * timed[0].run_secs), default=0)
    final = [m for m in timed if 2 * len(m.samples) > most]
    return [m for m in trials if any(m is other and _is_tied(final[0], m) for other in final)]


def tied(trials: Sequence[Trial]) -> list[Trial]:
    """Return who cannot be told from the fastest of the final, whether it came to the final or not, in the order of time."""
    final, timed = finalists(trials), _by_time(trials)
    fastest = min(final, key=timed.index)
    return [m for m in timed if _is_tied(fastest, m)]


def _by_time(trials: Sequence[Trial]) -> list[Trial]:
    return sorted((m for m in trials if m.samples), key=lambda m: m.run_secs)


def _is_tied(best: Trial, other: Trial) -> bool:
    """Compare samples of the same turns, as far as both took part: what changed in between meets both.

    The standard error of a median is 1.253 x sigma / sqrt(n), with sigma from the median absolute deviation.
    """
    ratios = [theirs / ours for ours, theirs in zip(best.samples, other.samples, strict=False)]
    median = statistics.median(ratios)
    sigma = 1.4826 * statistics.median(abs(ratio - median) for ratio in ratios)
    return median - 1 <= max(NOISE, 2 * 1.253 * sigma / math.sqrt(len(ratios)))
