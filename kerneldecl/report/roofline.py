"""Owns the roofline of a target: what each entry's winner reaches, under what the device's arithmetic and memory allow.

Knows nothing of how times were measured. Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", CACM 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kerneldecl.diagnostics.units import amount, duration
from kerneldecl.report.data import Entry
from kerneldecl.report.scale import Log
from kerneldecl.report.svg import BOLD_LETTER, LETTER, Point, across, drawing, line, link, path, text, upwards

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 940.0, 480.0, 90.0, 16.0, 20.0, 44.0
_LINE = 13.0
"""Height of a line of text."""
_MOST_NAMES = 30
_CELL = 4
Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""


def has_place(entry: Entry) -> bool:
    """Say whether an entry has a place: it is measured, and computes something."""
    return bool(entry.roofline and entry.run_secs and entry.roofline.flops > 0 and entry.roofline.least_bytes > 0)


def roofline(entries: Sequence[Entry], ids: Mapping[str, str]) -> str:
    """Return the roofline of one target's entries that have a place, as SVG; `ids` are the entries' places in the page."""
    points = {entry.name: _work(entry) for entry in entries}
    bandwidth = max(entry.roofline.dram_bytes_per_s for entry in entries if entry.roofline)
    peaks: dict[float, list[str]] = {}
    for entry in entries:
        if entry.roofline and entry.dtype not in peaks.setdefault(entry.roofline.peak_flops_per_s, []):
            peaks[entry.roofline.peak_flops_per_s].append(entry.dtype)
    ridge = max(peaks) / bandwidth
    x = Log(
        min(each[0] for each in points.values()) / 1.6, max(ridge * 2, *(each[0] * 1.6 for each in points.values())), LEFT, WIDTH - RIGHT
    )
    y = Log(min(each[1] for each in points.values()) / 2, max(peaks) * 1.6, HEIGHT - BOTTOM, TOP)
    placed = {name: (x(intensity), y(rate)) for name, (intensity, rate) in points.items()}
    parts = [
        *across(x, x.ticks(), y.start, lambda value: f"{value:g}", y.end),
        *upwards(y, y.ticks(), LEFT, lambda value: amount(value, "FLOP/s").replace(".00", "").replace(".0", ""), x.end),
        text(x.end, HEIGHT - 8, "FLOP per byte of the least memory traffic", "tick", "end"),
        *_roofs(x, y, bandwidth, peaks),
        *(link(ids[entry.name], placed[entry.name], _label(entry), "dot") for entry in sorted(entries, key=_work)),
        *_names(entries, placed, _roof_boxes(x, y, bandwidth, peaks)),
    ]
    return drawing((WIDTH, HEIGHT), f"Roofline of {len(entries)} entries", parts, has_links=True)


def _work(entry: Entry) -> Point:
    """Return an entry's FLOP per byte, and the rate that its winner reaches."""
    assert entry.roofline is not None, "it has a place"
    return entry.roofline.flops / entry.roofline.least_bytes, entry.roofline.flops / entry.run_secs


def _label(entry: Entry) -> str:
    assert entry.roofline is not None, "it has a place"
    rates = f"{amount(_work(entry)[1], 'FLOP/s')}, {amount(entry.roofline.least_bytes / entry.run_secs, 'B/s')}"
    return f"{entry.name}: {duration(entry.run_secs)}, {entry.share:.0%} of its roof; {rates}"


def _roofs(x: Log, y: Log, bandwidth: float, peaks: Mapping[float, Sequence[str]]) -> Iterator[str]:
    top = max(peaks)
    start = max(x.low, y.low / bandwidth)
    yield path([(x(start), y(start * bandwidth)), (x(top / bandwidth), y(top))], "roof")
    for peak, (left, baseline, _, _), label in zip(peaks, _roof_boxes(x, y, bandwidth, peaks), _roof_labels(peaks), strict=False):
        yield line((x(max(peak / bandwidth, x.low)), y(peak)), (x.end, y(peak)), "roof" if peak == top else "roof low")
        yield text(left, baseline + _LINE - 3, label, "roofname")
    left, upper, _, lower = _roof_boxes(x, y, bandwidth, peaks)[-1]
    yield text(left, (upper + lower) / 2 + 4, f"{amount(bandwidth, 'B/s')} DRAM", "roofname")


def _roof_labels(peaks: Mapping[float, Sequence[str]]) -> list[str]:
    return [f"{amount(peak, 'FLOP/s')} {', '.join(dtypes)}" for peak, dtypes in peaks.items()]


def _roof_boxes(x: Log, y: Log, bandwidth: float, peaks: Mapping[float, Sequence[str]]) -> list[Box]:
    """Return what the roofs take: of each peak the name above its right end, pieces of the slope, and last, left of it, its name."""
    boxes = [
        (x.end - LETTER * len(label), y(peak) - _LINE - 2, x.end, y(peak) - 2)
        for peak, label in zip(peaks, _roof_labels(peaks), strict=True)
    ]
    top = max(peaks)
    steep = (y(x.low * bandwidth) - y(top)) / (x(top / bandwidth) - x.start)
    start = max(x.low, y.low / bandwidth)
    at = start * (top / bandwidth / start) ** 0.45
    left = x(at) - LETTER * len(f"{amount(bandwidth, 'B/s')} DRAM") - 10
    slope = [(x(x.low) + step, y(x.low * bandwidth) - step * steep) for step in range(0, int(x(top / bandwidth) - x.start), 8)]
    pieces = [(across - 4, up - 4 * steep, across + 4, up + 4 * steep) for across, up in slope]
    return [*boxes, *pieces, (left, y(at * bandwidth) - _LINE, x(at), y(at * bandwidth))]


def _names(entries: Sequence[Entry], placed: Mapping[str, Point], taken: Sequence[Box]) -> Iterator[str]:
    """Yield names beside dots, of the furthest from their roofs first, each once and where there is room."""
    full = {cell for box in (*taken, *((x - 5, y - 5, x + 5, y + 5) for x, y in placed.values())) for cell in _cells(box)}
    named: set[str] = set()
    for entry in sorted(entries, key=lambda entry: entry.share or 0.0):
        name = entry.name.partition("@")[0].partition("[")[0]
        if name in named or len(named) == _MOST_NAMES:
            continue
        spots = _beside(placed[entry.name], BOLD_LETTER * len(name))
        box = next((box for box in spots if full.isdisjoint(_cells(box))), None)
        if box:
            named.add(name)
            full.update(_cells(box))
            yield text(box[0], box[3] - 3, name, "name")


def _cells(box: Box) -> list[tuple[int, int]]:
    """Return the squares of a grid that a box touches."""
    left, top, right, bottom = (int(side // _CELL) for side in box)
    return [(across, down) for across in range(left, right + 1) for down in range(top, bottom + 1)]


def _beside(at: Point, width: float) -> Iterator[Box]:
    x, y = at
    for left, top in (
        (x + 7, y - 6),
        (x + 5, y + 4),
        (x - width - 7, y - 6),
        (x + 5, y - 17),
        (x - width / 2, y + 6),
        (x - width, y + 7),
        (x - width / 2, y - 20),
    ):
        if left + width < WIDTH - RIGHT and left > LEFT and top + _LINE < HEIGHT - BOTTOM:
            yield left, top, left + width, top + _LINE
