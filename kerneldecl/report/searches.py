"""Owns the drawing of searches: the best time known, over the seconds of the search.

Knows nothing of how searches are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kerneldecl.diagnostics.units import duration
from kerneldecl.report.data import Curve, Entry
from kerneldecl.report.scale import Linear, Log
from kerneldecl.report.svg import TIMES, across, drawing, stairs, text, upwards
from kerneldecl.timing import median

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 940.0, 300.0, 58.0, 210.0, 16.0, 42.0
_MOST = 150
_LINE = 14.0
_POINTS = 120


def found_after(entries: Sequence[Entry]) -> dict[str, list[Curve]]:
    """Return the curves of searches, by whose they are."""
    found: dict[str, list[Curve]] = {}
    for entry in entries:
        for name, curve in entry.searches:
            found.setdefault(name, []).append(curve)
    return found


def searches(by_name: dict[str, list[Curve]]) -> str:
    """Return all curves, each relative to the best that it came to, and the median of each name's, as SVG."""
    last = max(curve[-1][0] for curves in by_name.values() for curve in curves) or 1.0
    drawn = {name: [_relative(curve) for curve in curves] for name, curves in by_name.items()}
    most = min(16.0, max(curve[0][1] for curves in drawn.values() for curve in curves))
    x, y = Linear(0.0, last, LEFT, WIDTH - RIGHT), Log(1.0, max(1.1, most), HEIGHT - BOTTOM, TOP)
    parts = [
        *across(x, x.ticks(7), y.start, lambda value: f"{value:g} s", y.end),
        *upwards(y, y.ticks(), LEFT, lambda value: f"{value:g}{TIMES}", x.end),
        *(_stairs(curve, x, y, "thin") for curves in drawn.values() for curve in curves[: _MOST // len(drawn)]),
        *_medians(drawn, x, y),
        text(x.end, HEIGHT - 6, "seconds since the entry's search began", "tick", "end"),
    ]
    return drawing((WIDTH, HEIGHT), "Best time known over the seconds of each search", parts)


def own_search(found: Sequence[tuple[str, Curve]]) -> str:
    """Return an entry's searches as a small SVG, with times."""
    last = max(0.1, *(curve[-1][0] for _, curve in found)) * 1.1
    times = [secs for _, curve in found for _, secs in curve]
    x, y = Linear(0.0, last, 70, 300), Log(min(times) / 1.02, max(min(times) * 1.05, *times), 96, 10)
    shown = [y.low * 1.02, max(times)] if max(times) > min(times) * 1.05 else [min(times)]
    parts = [
        *across(x, x.ticks(4), 96, lambda value: f"{value:g} s", 10),
        *upwards(y, shown, 70, duration, 300),
        *(stairs([(x(at), y(secs)) for at, secs in curve], x.end, "curve") for _, curve in found),
        *(text(306, y(curve[-1][1]) + 4 - 13 * place, name, "row") for place, (name, curve) in enumerate(found)),
    ]
    return drawing((430, 120), "Best time known over the seconds of its search", parts)


def _relative(curve: Curve) -> Curve:
    return tuple((at, secs / curve[-1][1]) for at, secs in curve)


def _stairs(curve: Curve, x: Linear, y: Log, kind: str) -> str:
    return stairs([(x(at), y(min(factor, y.high))) for at, factor in curve], x(curve[-1][0]), kind)


def _medians(drawn: dict[str, list[Curve]], x: Linear, y: Log) -> Iterator[str]:
    taken: list[float] = []
    for name, curves in drawn.items():
        times = [x.high * step / _POINTS for step in range(_POINTS + 1)]
        begun = [at for at in times if all(curve[0][0] <= at for curve in curves)]
        middle = tuple((at, median([_known(curve, at) for curve in curves])) for at in begun)
        if not middle:
            continue
        yield _stairs(middle, x, y, "curve")
        spot = next(y(middle[-1][1]) + 4 - _LINE * step for step in range(len(drawn)) if y(middle[-1][1]) + 4 - _LINE * step not in taken)
        taken.append(spot)
        yield text(x.end + 10, spot, f"{name}, median of {len(curves)}" if len(curves) > 1 else name, "name")


def _known(curve: Curve, at: float) -> float:
    return next(factor for since, factor in reversed(curve) if since <= at)
