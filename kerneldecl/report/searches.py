"""Owns the drawing of searches: the best time known, over the seconds of the search.

Knows nothing of how searches are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kerneldecl.diagnostics.units import duration
from kerneldecl.report.data import Curve, Entry
from kerneldecl.report.scale import Linear, Log
from kerneldecl.report.svg import TIMES, across, drawing, spread, stairs, text, upwards
from kerneldecl.timing import median

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 940.0, 300.0, 58.0, 210.0, 16.0, 42.0
_MOST = 150
_LINE = 14.0
_POINTS = 120
_MOST_FACTOR = 32.0
"""Slower first finds are drawn at the upper end."""


def searched(entries: Sequence[Entry]) -> dict[str, list[Curve]]:
    """Return the curves of searches by whose they are, each relative to the best that any search of its entry came to."""
    found: dict[str, list[Curve]] = {}
    for entry in entries:
        best = min((curve[-1][1] for _, curve in entry.searches), default=0.0)
        for name, curve in entry.searches:
            found.setdefault(name, []).append(tuple((at, secs / best) for at, secs in curve))
    return found


def searches(by_name: dict[str, list[Curve]]) -> str:
    """Return all curves of `searched`, and the median of each name's, as SVG."""
    last = max(curve[-1][0] for curves in by_name.values() for curve in curves) or 1.0
    most = min(_MOST_FACTOR, max(curve[0][1] for curves in by_name.values() for curve in curves))
    x, y = Linear(0.0, last, LEFT, WIDTH - RIGHT), Log(1.0, max(1.1, most), HEIGHT - BOTTOM, TOP)
    parts = [
        *across(x, x.ticks(7), y.start, lambda value: f"{value:g} s", y.end),
        *upwards(y, y.ticks(), LEFT, lambda value: f"{value:g}{TIMES}", x.end),
        *(_stairs(curve, x, y, "thin") for curves in by_name.values() for curve in curves[: _MOST // len(by_name)]),
        *_medians(by_name, x, y),
        text(x.end, HEIGHT - 6, "seconds since the entry's search began", "tick", "end"),
    ]
    return drawing((WIDTH, HEIGHT), "Best time known over the seconds of each search", parts)


def own_search(found: Sequence[tuple[str, Curve]]) -> str:
    """Return an entry's searches as a small SVG, with times."""
    last = max(0.1, *(curve[-1][0] for _, curve in found)) * 1.1
    times = [secs for _, curve in found for _, secs in curve]
    x, y = Linear(0.0, last, 70, 300), Log(min(times) / 1.02, max(min(times) * 1.05, *times), 96, 10)
    shown = [y.low * 1.02, max(times)] if max(times) > min(times) * 1.05 else [min(times)]
    ends = spread([y(curve[-1][1]) for _, curve in found], _LINE)
    parts = [
        *across(x, x.ticks(4), 96, lambda value: f"{value:g} s", 10),
        *upwards(y, shown, 70, duration, 300),
        *(stairs([(x(at), y(secs)) for at, secs in curve], x.end, "curve") for _, curve in found),
        *(text(306, at + 4, name, "row") for at, (name, _) in zip(ends, found, strict=True)),
    ]
    return drawing((430, 120), "Best time known over the seconds of its search", parts)


def _stairs(curve: Curve, x: Linear, y: Log, kind: str) -> str:
    return stairs([(x(at), y(min(factor, y.high))) for at, factor in curve], x(curve[-1][0]), kind)


def _medians(by_name: dict[str, list[Curve]], x: Linear, y: Log) -> Iterator[str]:
    drawn = {name: middle for name, curves in by_name.items() if (middle := _median(curves, x.high))}
    ends = spread([y(min(middle[-1][1], y.high)) for middle in drawn.values()], _LINE)
    for (name, middle), at in zip(drawn.items(), ends, strict=True):
        yield _stairs(middle, x, y, "curve")
        count = len(by_name[name])
        yield text(x.end + 10, at + 4, f"{name}, median of {count}" if count > 1 else name, "name")


def _median(curves: Sequence[Curve], last: float) -> Curve:
    """Return the median of curves from when all have found anything."""
    times = (last * step / _POINTS for step in range(_POINTS + 1))
    return tuple((at, median([_known(curve, at) for curve in curves])) for at in times if all(curve[0][0] <= at for curve in curves))


def _known(curve: Curve, at: float) -> float:
    return next(factor for since, factor in reversed(curve) if since <= at)
