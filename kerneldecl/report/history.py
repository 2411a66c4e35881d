"""Owns the drawing of times over the lock's git revisions: the mean of all entries, and those that have changed most.

Knows nothing of git.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kerneldecl.report.data import Entry, Revision
from kerneldecl.report.scale import Linear, Log
from kerneldecl.report.svg import LETTER, TIMES, Point, drawing, line, path, shortened, text, upwards
from kerneldecl.tuning.model_rank import geometric_mean

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 940.0, 360.0, 58.0, 330.0, 18.0, 40.0
_MOST = 60
"""Entries that get a line: those that changed most."""
_MOVED = 1.02
"""Factor between its slowest and its fastest time from which an entry has a line."""
_LINE = 14.0
_LETTERS = 42


class Course(NamedTuple):
    """An entry's times over revisions, relative to its first."""

    name: str
    factors: tuple[float | None, ...]

    @property
    def moved(self) -> float:
        known = [factor for factor in self.factors if factor]
        return max(known) / min(known)


def courses(entries: Sequence[Entry]) -> list[Course]:
    """Return the entries that have a time now and at a revision before, those that have changed most first."""
    found = []
    for entry in entries:
        known = [secs for secs in entry.history if secs]
        if entry.run_secs and len(known) > 1:
            found.append(Course(entry.name, tuple(secs and secs / known[0] for secs in entry.history)))
    return sorted(found, key=lambda course: -course.moved)


def history(found: Sequence[Course], revisions: Sequence[Revision]) -> str:
    """Return times relative to each entry's first over revisions, as SVG: below 1 it has become faster."""
    moved = [course for course in found if course.moved >= _MOVED][:_MOST]
    means = _means(found)
    drawn = [factor for course in moved for factor in course.factors if factor] + [mean for mean in means if mean]
    x = Linear(0, len(revisions) - 1, LEFT, WIDTH - RIGHT)
    y = Log(min(0.95, *drawn) / 1.03, max(1.05, *drawn) * 1.03, HEIGHT - BOTTOM, TOP)
    named = [
        ("mean of all", means, "name"),
        *((shortened(course.name.partition("@")[0], _LETTERS), course.factors, "row") for course in moved),
    ]
    parts = [
        *upwards(y, _ticks(y), LEFT, lambda value: f"{value:g}{TIMES}", x.end),
        line((x.start, y(1.0)), (x.end, y(1.0)), "base"),
        *_dates(revisions, x, y.start),
        *(path(run, "thin") for course in moved for run in _runs(course.factors, x, y)),
        *(path(run, "curve") for run in _runs(means, x, y)),
        *_labels(named, x.end, y),
    ]
    return drawing((WIDTH, HEIGHT), f"Times of {len(found)} entries over {len(revisions)} revisions of the lock", parts)


_TICKS = (0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)


def _ticks(y: Log) -> list[float]:
    kept: list[float] = []
    for value in sorted((tick for tick in _TICKS if y.low <= tick <= y.high), key=lambda tick: abs(y(tick) - y(1.0))):
        if all(abs(y(value) - y(other)) > _LINE for other in kept):
            kept.append(value)
    return kept


def _means(found: Sequence[Course]) -> list[float | None]:
    """Return the mean of all at each revision.

    It goes from one to the next by the entries that have a time at both: new ones change nothing.
    """
    columns = list(zip(*(course.factors for course in found), strict=True))
    means: list[float | None] = [1.0]
    for before, after in itertools.pairwise(columns):
        means.append((means[-1] or 1.0) * geometric_mean([new / old for old, new in zip(before, after, strict=True) if old and new]))
    return means


def _runs(factors: Sequence[float | None], x: Linear, y: Log) -> Iterator[list[Point]]:
    """Yield the pieces of a line between revisions in which there is no time."""
    run: list[Point] = []
    for place, factor in enumerate([*factors, None]):
        if factor:
            run.append((x(place), y(factor)))
        elif run:
            yield run if len(run) > 1 else [*run, *run]
            run = []


def _labels(lines: Sequence[tuple[str, Sequence[float | None], str]], x: float, y: Log) -> Iterator[str]:
    """Yield names behind the ends of lines, with their last values, as far as there is room; the first ones have the first choice."""
    taken: list[float] = []
    for name, factors, kind in lines:
        factor = factors[-1] or 1.0
        shifts = (side * step for step in (0.0, _LINE / 2, _LINE, 1.5 * _LINE) for side in (1, -1))
        spot = next((y(factor) + shift for shift in shifts if all(abs(y(factor) + shift - other) >= _LINE for other in taken)), None)
        if spot is not None and y.end - 4 < spot < y.start + 4:
            taken.append(spot)
            yield text(x + 10, spot + 4, f"{factor:.2f}{TIMES} {name}", kind)


def _dates(revisions: Sequence[Revision], x: Linear, bottom: float) -> Iterator[str]:
    last = float("-inf")
    for place, each in enumerate(revisions):
        told = each.date[5:] if each.digest else each.date
        yield f'<path class="tickmark" d="M{x(place):.1f} {bottom:.1f}v4"/>'
        is_new = not place or each.date != revisions[place - 1].date
        if is_new and x(place) - last > LETTER * 7:
            last = x(place)
            yield text(x(place), bottom + 18, told, "tick", "middle")
