"""Owns the drawing of searches as SVG: the best time known, over the seconds of the search, a line for each policy.

Knows nothing of how the searches were made. An axis's values are powers of ten of the fastest and the slowest that are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from xml.sax.saxutils import escape

from kerneldecl.compare.searches import Searched, by_entry
from kerneldecl.diagnostics.units import duration
from kerneldecl.errors import printable

COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#8e5aa8", "#b8860b", "#4a4a4a", "#d1495b", "#00798c")
"""Of the policies in their order; more than these begin again."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, LINE = 760, 300, 90, 34, 40, 18


def svg(searches: Sequence[Searched]) -> str:
    """Return an SVG with a diagram for each entry; entries without any time have none."""
    drawn = {entry: several for entry, several in by_entry(searches).items() if any(each.curve for each in several)}
    policies = list(dict.fromkeys(each.policy for each in searches))
    colours = {policy: COLOURS[place % len(COLOURS)] for place, policy in enumerate(policies)}
    parts = [part for place, (entry, several) in enumerate(drawn.items()) for part in _diagram(entry, several, colours, place * HEIGHT)]
    legend_at = len(drawn) * HEIGHT
    for place, policy in enumerate(policies):
        y = legend_at + LINE * (place + 1)
        parts.append(f'<line x1="{LEFT}" y1="{y - 4}" x2="{LEFT + 24}" y2="{y - 4}" stroke="{colours[policy]}" stroke-width="2"/>')
        parts.append(_text(LEFT + 32, y, policy))
    height = legend_at + LINE * (len(policies) + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>', *parts, "</svg>", ""])


def _diagram(entry: str, searches: Sequence[Searched], colours: dict[str, str], y: int) -> Iterator[str]:
    points = [point for each in searches for point in each.curve]
    last_secs = max(*(each.search_secs for each in searches), *(at for at, _ in points)) or 1.0
    least, most = min(best for _, best in points), max(best for _, best in points)
    span = math.log(most / least) or 1.0
    low, high = y + HEIGHT - BOTTOM, y + TOP

    def at(secs: float, best: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - 20) * secs / last_secs
        return round(across, 1), round(low - (low - high) * math.log(best / least) / span, 1)

    yield _text(LEFT, y + 18, entry, weight="bold")
    yield f'<path d="M{LEFT},{high} V{low} H{WIDTH - 20}" fill="none" stroke="#888888"/>'
    for secs in (0.0, last_secs / 2, last_secs):
        yield _text(at(secs, least)[0], low + 16, f"{secs:.3g} s", anchor="middle")
    for best in dict.fromkeys((least, math.sqrt(least * most), most)):
        yield _text(LEFT - 8, at(0, best)[1] + 4, duration(best), anchor="end")
    for each in (each for each in searches if each.curve):
        yield f'<path d="{_steps(each, last_secs, at)}" fill="none" stroke="{colours[each.policy]}" stroke-width="2"/>'


def _steps(each: Searched, last_secs: float, at: Callable[[float, float], tuple[float, float]]) -> str:
    """Return a path that falls where something better was found, and goes on to the end of the search."""
    x, y = at(*each.curve[0])
    path = f"M{x},{y}"
    for secs, best in each.curve[1:]:
        x, y = at(secs, best)
        path += f" H{x} V{y}"
    return f"{path} H{at(min(max(each.search_secs, each.curve[-1][0]), last_secs), each.curve[-1][1])[0]}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}">{escape(printable(text))}</text>'
