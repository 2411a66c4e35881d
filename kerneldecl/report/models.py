"""Owns what the report draws of a policy's model: predicted beside measured times, and what measuring only its first k would have given.

Knows nothing of how policies predict.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kerneldecl.diagnostics.units import counted, duration
from kerneldecl.report.data import Entry
from kerneldecl.report.scale import Linear, Log
from kerneldecl.report.svg import across, dots, drawing, line, path, text, upwards
from kerneldecl.timing import median
from kerneldecl.tuning.model_rank import geometric_mean

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300.0, 250.0, 58.0, 12.0, 14.0, 42.0
_MOST_DOTS = 1500
"""Candidates of one policy that are drawn: of more, every second, third and so on."""
_KNOWN = 20
"""The k of best-of-k that are drawn."""


@dataclass(frozen=True)
class Model:
    """A policy's predictions beside what was measured, over all entries."""

    policy: str
    pairs: tuple[tuple[float, float], ...]
    """Measured and predicted seconds of each candidate, the winners' first."""
    winners: int
    best_of: tuple[tuple[float, ...], ...]
    """Of each entry whose winner is the policy's, the shares of best-of-k."""


def models(entries: Sequence[Entry]) -> list[Model]:
    """Return the models of the policies that have predicted what was measured, the one with most candidates first."""
    winners: dict[str, list[tuple[float, float]]] = {}
    others: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        for place, each in enumerate(entry.tried):
            if each.trial.samples and 0 < each.trial.predicted_secs < math.inf and each.policy:
                side = others if place else winners
                side.setdefault(each.policy, []).append((each.trial.run_secs, each.trial.predicted_secs))
    shares = {policy: tuple(entry.best_of for entry in entries if entry.policy == policy and entry.best_of) for policy in winners}
    found = [
        Model(policy, (*winners.get(policy, ()), *others.get(policy, ())), len(winners.get(policy, ())), shares.get(policy, ()))
        for policy in dict.fromkeys((*winners, *others))
    ]
    return sorted(found, key=lambda model: -len(model.pairs))


def summary(model: Model) -> str:
    """Return how far predictions are off, in words."""
    ranked = sorted(predicted / measured for measured, predicted in model.pairs)
    low, high = ranked[len(ranked) // 10], ranked[len(ranked) * 9 // 10]
    return (
        f"predicted / measured: median {median(ranked):.2f}, 80 % of {counted(len(ranked), 'candidate')} between {low:.2f} and {high:.2f}"
    )


def predictions(model: Model) -> str:
    """Return predicted over measured times as SVG; on the line they agree."""
    low, high = min(map(min, model.pairs)) / 1.2, max(map(max, model.pairs)) * 1.2
    x, y = Log(low, high, LEFT, WIDTH - RIGHT), Log(low, high, HEIGHT - BOTTOM, TOP)
    rest = model.pairs[model.winners :]
    thinned = rest[:: len(rest) // _MOST_DOTS + 1]
    parts = [
        *across(x, _apart(x, 44), y.start, _time, y.end),
        *upwards(y, _apart(y, 22), LEFT, _time, x.end),
        line((x(low), y(low)), (x(high), y(high)), "base"),
        dots(((x(measured), y(predicted)) for measured, predicted in thinned), "faint"),
        dots(((x(measured), y(predicted)) for measured, predicted in model.pairs[: model.winners][:_MOST_DOTS]), "strong"),
        text(LEFT + 6, TOP + 10, "predicted", "tick"),
        text(x.end, HEIGHT - 8, "measured", "tick", "end"),
    ]
    return drawing((WIDTH, HEIGHT), f"Predicted over measured times of {model.policy}", parts)


def best_of(model: Model) -> str:
    """Return, as SVG, which part of the fastest's speed the first k of the policy's order hold: geometric mean, and the worst entry."""
    counts = range(1, min(_KNOWN, max(map(len, model.best_of))) + 1)
    each = [[shares[min(count, len(shares)) - 1] for shares in model.best_of] for count in counts]
    lowest = min(map(min, each))
    x, y = Linear(1, max(2, counts[-1]), LEFT, WIDTH - RIGHT), Linear(min(0.95, lowest), 1.0, HEIGHT - BOTTOM, TOP)
    parts = [
        *across(x, [tick for tick in (1, 2, 5, 10, 15, 20) if tick <= x.high], y.start, lambda value: f"{value:g}", y.end),
        *upwards(y, y.ticks(5), LEFT, lambda value: f"{value:.0%}" if (value * 100) % 1 < 0.01 else f"{value:.1%}", x.end),
        *_curves(x, y, each, len(model.best_of)),
        text(x.end, HEIGHT - 8, "first k in the policy's order", "tick", "end"),
    ]
    return drawing((WIDTH, HEIGHT), f"Best of the first k of {model.policy}", parts)


def _curves(x: Linear, y: Linear, each: Sequence[Sequence[float]], entries: int) -> Iterator[str]:
    worst = [(x(count), y(min(shares))) for count, shares in enumerate(each, start=1)]
    means = [(x(count), y(geometric_mean(shares))) for count, shares in enumerate(each, start=1)]
    if entries > 1:
        yield path(worst, "thin")
        yield text(x.end, min(max(worst[-1][1] + 16, means[-1][1] + 32), y.start - 22), "worst entry", "tick", "end")
    yield path(means, "curve")
    yield text(x.end, min(means[-1][1] + 16, y.start - 6), "mean" if entries > 1 else "this entry", "name", "end")


def _time(value: float) -> str:
    number, _, unit = duration(value).partition(" ")
    return f"{float(number):g} {unit}"


def _apart(axis: Log, least: float) -> list[float]:
    """Return ticks that leave room for their labels."""
    kept: list[float] = []
    for value in axis.ticks():
        if not kept or abs(axis(value) - axis(kept[-1])) >= least:
            kept.append(value)
    return kept
