"""Owns the parts of drawings: texts, lines, dots, frames with ticks, as SVG whose inks are classes of the page's style.

Knows nothing of what is drawn. Places are in CSS pixels, from the upper left corner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape

from kerneldecl.errors import printable
from kerneldecl.report.scale import Linear, Log

LETTER = 6.4
"""Width of a letter in a drawing, on average."""
BOLD_LETTER = 7.2
TIMES = "\N{MULTIPLICATION SIGN}"
Point = tuple[float, float]
Axis = Linear | Log


def number(value: float) -> str:
    """Return a place with one decimal at most."""
    return f"{value:.1f}".removesuffix(".0")


@functools.lru_cache(maxsize=1 << 16)
def words(value: str) -> str:
    """Return text as HTML: names may be anybody's. Cells of tables are the same few thousand."""
    return escape(printable(value))


def shortened(name: str, letters: int) -> str:
    """Return a name of so many letters at most: what differs between entries of one name stands at its end."""
    return name if len(name) <= letters else f"{name[: letters // 2]}…{name[-(letters // 2) + 1 :]}"


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "") -> str:
    """Return a text; `kind` names classes, `anchor` is "middle" or "end"."""
    ink = f' class="{kind}"' if kind else ""
    side = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{number(x)}" y="{number(y)}"{ink}{side}>{words(content)}</text>'


def line(start: Point, end: Point, kind: str) -> str:
    return f'<path class="{kind}" d="M{number(start[0])} {number(start[1])}L{number(end[0])} {number(end[1])}"/>'


def path(points: Iterable[Point], kind: str) -> str:
    """Return a line through points."""
    return f'<path class="{kind}" d="M{"L".join(f"{number(x)} {number(y)}" for x, y in points)}"/>'


def stairs(points: Sequence[Point], end: float, kind: str) -> str:
    """Return a line that holds each value until the next, and the last one to the end."""
    (x, y), *rest = points
    steps = "".join(f"H{number(at)}V{number(value)}" for at, value in rest)
    return f'<path class="{kind}" d="M{number(x)} {number(y)}{steps}H{number(end)}"/>'


def dots(points: Iterable[Point], kind: str) -> str:
    """Return dots as one path of no length with round ends: thousands of them are one element."""
    return f'<path class="{kind}" d="{"".join(f"M{number(x)} {number(y)}h0" for x, y in points)}"/>'


def link(name: str, at: Point, label: str, kind: str) -> str:
    """Return a dot that leads to an entry; the page says its label where it is pointed at or has the focus."""
    place = f'cx="{number(at[0])}" cy="{number(at[1])}"'
    return f'<a href="#{name}" aria-label="{words(label)}"><circle class="{kind}" {place} r="4"/></a>'


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Return places that leave a gap between neighbours, each as near to where it was as those above allow."""
    moved: dict[int, float] = {}
    last = float("-inf")
    for at in sorted(range(len(places)), key=lambda at: places[at]):
        last = moved[at] = max(places[at], last + gap)
    excess = max(0.0, last - max(places)) / 2
    return [moved[at] - excess for at in range(len(places))]


def drawing(size: Point, label: str, parts: Iterable[str], *, has_links: bool = False) -> str:
    """Return an SVG of a size that a label describes; what has links is a group of them for those who cannot see it."""
    role = "group" if has_links else "img"
    kind = ' class="dots"' if has_links else ""
    width, height = map(number, size)
    head = f'<svg viewBox="0 0 {width} {height}" style="max-width:{width}px" role="{role}" aria-label="{words(label)}"{kind}>'
    return "\n".join((head, *parts, "</svg>"))


def across(axis: Axis, ticks: Iterable[float], y: float, shown: Callable[[float], str], top: float) -> Iterator[str]:
    """Yield the ticks of an axis below a drawing, with thin lines up to the top."""
    for value in ticks:
        yield line((axis(value), y), (axis(value), top), "grid")
        yield text(axis(value), y + 16, shown(value), "tick", "middle")


def upwards(axis: Axis, ticks: Iterable[float], x: float, shown: Callable[[float], str], end: float) -> Iterator[str]:
    """Yield the ticks of an axis left of a drawing, with thin lines to the end."""
    for value in ticks:
        yield line((x, axis(value)), (end, axis(value)), "grid")
        yield text(x - 7, axis(value) + 4, shown(value), "tick", "end")
