"""Owns how verified candidates are timed against each other and which of them wins.

Knows nothing of processes or kernels: it asks for samples and gets seconds.

Successive halving: everyone gets a few samples, the slow ones drop out, the last four get many. Within a round the
candidates take turns, so that a change of clock or load meets all of them. Halving and racing as in Jamieson and
Talwalkar, "Non-stochastic best arm identification", AISTATS 2016.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from kerneldecl.model import Measurement

Sampler = Callable[[Measurement, int], "list[float] | str"]
"""Times a candidate: takes it and the calls a sample is made of, returns seconds a call, or why there are none."""

ROUNDS = ((3, 4.0, 20), (7, 1.5, 8), (20, 1.15, 4))
"""Samples of a round, the slowdown against the best with which one still takes part, and the most that take part."""
SAMPLE_SECS = 1e-3
"""A sample is as many calls as take this long, so that the clock's own cost does not count."""
ROUND_SECS = 1.5
"""Slow kernels get fewer samples, so that no round takes much longer; three at least."""
NOISE = 0.005
"""Two medians closer than this are one to us."""


def race(verified: Sequence[tuple[Measurement, float]], sample: Sampler) -> list[Measurement]:
    """Return the candidates, each with its samples or a failure. Each comes with the seconds of a first run."""
    field = {id(m): m for m, _ in verified}
    secs = {id(m): first for m, first in verified}
    order = list(field)
    for samples, slowdown, most in ROUNDS:
        # Equal times fall back on the declared order, so that the order of arrival plays no part.
        order.sort(key=lambda index: (secs[index], field[index].code_bytes, field[index].code))
        order = [index for index in order[:most] if secs[index] <= slowdown * secs[order[0]]]
        total = sum(max(secs[index], SAMPLE_SECS) for index in order)
        count = max(3, min(samples, int(ROUND_SECS / total))) if order else 0
        for _ in range(count):
            for index in [i for i in order if not field[i].failure]:
                field[index] = _sampled(field[index], secs[index], sample)
        for index in order:
            if field[index].samples:
                secs[index] = field[index].run_secs
    # Who dropped out before the first round keeps the time of its first run.
    return [m if m.samples or m.failure else replace(m, samples=(secs[index],)) for index, m in field.items()]


def _sampled(measurement: Measurement, expected_secs: float, sample: Sampler) -> Measurement:
    calls = max(1, math.ceil(SAMPLE_SECS / max(expected_secs, 1e-7)))
    answer = sample(measurement, calls)
    if isinstance(answer, str):
        return replace(measurement, samples=(), failure=answer)
    return replace(measurement, samples=(*measurement.samples, *answer))


def ranking(measurements: Sequence[Measurement]) -> tuple[list[Measurement], int]:
    """Return all measurements, winner first, then by time, failed ones last; and how many tied with the winner.

    Among those that noise cannot tell from the fastest, the one with the least code wins, then the lower digest: a
    second run picks the same one.
    """
    timed = sorted((m for m in measurements if m.samples), key=lambda m: m.run_secs)
    if not timed:
        return list(measurements), 0
    tied = [m for m in timed if _is_tied(timed[0], m)]
    winner = min(tied, key=lambda m: (m.code_bytes, m.code))
    others = [m for m in timed if m is not winner]
    return [winner, *others, *(m for m in measurements if not m.samples)], len(tied) - 1


def _is_tied(best: Measurement, other: Measurement) -> bool:
    gap = other.run_secs - best.run_secs
    return gap <= max(NOISE * best.run_secs, 2 * math.hypot(_median_error(best), _median_error(other)))


def _median_error(measurement: Measurement) -> float:
    """Return the standard error of the median: 1.253 x sigma / sqrt(n), sigma from the median absolute deviation."""
    median = measurement.run_secs
    sigma = 1.4826 * statistics.median(abs(sample - median) for sample in measurement.samples)
    return 1.253 * sigma / math.sqrt(len(measurement.samples))
