"""Owns the drawing of a build over time: a line for each process, filled where it was busy.

Knows nothing of events.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from kerneldecl.diagnostics.units import counted, duration
from kerneldecl.report.data import Built, Busy
from kerneldecl.report.scale import Linear
from kerneldecl.report.svg import across, drawing, number, text

WIDTH, LEFT, RIGHT, TOP, ROW, FOOT = 940.0, 150.0, 170.0, 10.0, 22.0, 30.0
KINDS = ("compile", "policy", "measure")
"""First words of processes that have an ink of their own."""
_MOST_ROWS = 40
_LEAST_GAP = 0.4
"""CSS pixels of rest that are drawn: thousands of requests with less between them are one piece."""
_NUMBER = re.compile(r" \d+$")


def timeline(built: Built) -> str:
    """Return what processes did as SVG, those that measure last."""
    by_process: dict[str, list[Busy]] = {}
    for each in sorted(built.busy, key=lambda each: each.began_secs):
        by_process.setdefault(each.process, []).append(each)
    rows = sorted(by_process.items(), key=lambda row: (_order(row[0]), row[1][0].began_secs))[:_MOST_ROWS]
    left_out = len(by_process) - len(rows)
    bottom = TOP + ROW * len(rows)
    x = Linear(0.0, max(built.secs, *(each.began_secs + each.secs for each in built.busy)), LEFT, WIDTH - RIGHT)
    parts = [*across(x, x.ticks(8), bottom, lambda value: f"{value:g} s", TOP)]
    for place, (process, busy) in enumerate(rows):
        y = TOP + ROW * place
        part = sum(each.secs for each in busy) / max(built.secs, 1e-9)
        kind = _kind(process)
        parts += [
            text(LEFT - 10, y + 15, _named(process, by_process), "row", "end"),
            f'<path class="idle" d="M{number(x.start)} {number(y + 11)}H{number(x.end)}"/>',
            f'<path class="busy {kind if kind in KINDS else "other"}" d="{"".join(_pieces(busy, x, y + 5))}"/>',
            text(WIDTH - RIGHT + 12, y + 15, f"busy {part:.0%}, {counted(len(busy), 'request')}", "row"),
        ]
    if left_out:
        parts.append(text(LEFT, bottom + FOOT + 8, f"{left_out} more processes", "tick"))
    return drawing((WIDTH, bottom + FOOT + 14 * bool(left_out)), f"What {len(by_process)} processes did in {duration(built.secs)}", parts)


def _kind(process: str) -> str:
    return process.partition(" ")[0]


def _order(process: str) -> int:
    kind = _kind(process)
    return KINDS.index(kind) if kind in KINDS else -1


def _named(process: str, others: dict[str, list[Busy]]) -> str:
    """Return a process's name; without its number where it is the only one of its kind."""
    plain = _NUMBER.sub("", process)
    return plain if sum(_NUMBER.sub("", other) == plain for other in others) == 1 else process


def _pieces(busy: Sequence[Busy], x: Linear, y: float) -> Iterator[str]:
    begin, end = x(busy[0].began_secs), x(busy[0].began_secs + busy[0].secs)
    for each in busy[1:]:
        start, stop = x(each.began_secs), x(each.began_secs + each.secs)
        if start - end > _LEAST_GAP:
            yield _piece(begin, end, y)
            begin, end = start, stop
        end = max(end, stop)
    yield _piece(begin, end, y)


def _piece(begin: float, end: float, y: float) -> str:
    width = number(max(end - begin, 0.5))
    return f"M{number(begin)} {number(y)}h{width}v12h-{width}z"
