"""Owns the drawing of factors: how much faster or slower one thing is than another, an entry a line, on an axis around 1.

Knows nothing of what is compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kerneldecl.report.scale import Log
from kerneldecl.report.svg import LETTER, across, drawing, line, shortened, text

WIDTH, RIGHT, TOP, ROW, FOOT = 940.0, 170.0, 22.0, 18.0, 26.0
MOST = 24
"""Rows at each end; of more, the middle is left out."""
_LETTERS = 48
_LEAST = 1.05
"""Factor that an axis shows at least to both sides."""


class Ratio(NamedTuple):
    name: str
    value: float
    """Above 1 where ours, or that of now, is faster."""
    told: str
    """Behind the dot: the two times."""


def ratios(found: Sequence[Ratio], label: str, slower: str, faster: str) -> str:
    """Return the factors, the largest first, as SVG; `slower` and `faster` say what the two sides of 1 mean."""
    ranked = sorted(found, key=lambda each: -each.value)
    left_out = max(0, len(ranked) - 2 * MOST)
    shown = [*ranked[:MOST], *ranked[MOST + left_out :]]
    names = [shortened(each.name, _LETTERS) for each in shown]
    left = 20 + LETTER * max(14, *map(len, names))
    bottom = TOP + ROW * (len(shown) + bool(left_out))
    x = Log(min(1 / _LEAST, ranked[-1].value / 1.03), max(_LEAST, ranked[0].value * 1.03), left, WIDTH - RIGHT)
    parts = [
        *across(x, _ticks(x), bottom, lambda value: f"{value:g}", TOP),
        line((x(1.0), bottom), (x(1.0), TOP - 6), "base"),
        text(x(1.0) - 8, TOP - 8, f"← {slower}", "tick", "end"),
        text(x(1.0) + 8, TOP - 8, f"{faster} →", "tick"),
    ]
    for place, (each, name) in enumerate(zip(shown, names, strict=True)):
        y = TOP + ROW * (place + 0.5 + (bool(left_out) and place >= MOST))
        kind = "fast" if each.value >= 1 else "slow"
        parts += [
            text(left - 10, y + 4, name, "row", "end"),
            line((x(1.0), y), (x(each.value), y), f"stem {kind}"),
            f'<circle class="{kind}" cx="{x(each.value):.1f}" cy="{y:.1f}" r="4"/>',
            text(WIDTH - RIGHT + 12, y + 4, each.told, "row"),
        ]
    if left_out:
        middle = ranked[MOST : MOST + left_out]
        told = f"… {left_out} more, from {middle[0].value:.3g} to {middle[-1].value:.3g}"
        parts.append(text(left - 10, TOP + ROW * (MOST + 0.5) + 4, told, "tick", "end"))
    return drawing((WIDTH, bottom + FOOT), label, parts)


def _ticks(x: Log) -> list[float]:
    fine = [
        value
        for value in (0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
        if x.low <= value <= x.high
    ]
    kept: list[float] = []
    for value in sorted(fine, key=lambda value: (value != 1.0, abs(x(value) - x(1.0)))):
        if all(abs(x(value) - x(other)) > 34 for other in kept):
            kept.append(value)
    return kept
