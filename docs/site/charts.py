"""Owns the charts of the page of figures: SVG, drawn of the tables in benchmarks/RESULTS.md.

Knows nothing of how figures were measured.

A chart is a row of dots for each row of a table, on a logarithmic axis. A cell may hold several figures, `1.02, 1.05`, or a range,
`1.0 to 1.4`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import MappingProxyType

FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w^])")


@dataclass(frozen=True)
class Chart:
    """What a chart shows: a table of RESULTS.md by the heading above it, and the columns whose figures are dots."""

    heading: str
    columns: tuple[str, ...]
    axis: str
    table: int = 0
    """The table's position below the heading."""
    parity: float = 1.0
    """Where a line is drawn."""


CHARTS: Mapping[str, Chart] = MappingProxyType(
    {
        "gpu-kernels": Chart(
            "GPU kernels beside torch and TVM's default schedules", ("torch / ours", "dlight / ours"), "the other's time / ours"
        ),
        "gpu-models": Chart("Exported models on a GPU", ("torch / ours",), "torch's time / ours"),
        "wgmma": Chart("Hopper's wgmma beside cuBLAS and cuDNN", ("vendor / ours",), "the vendor's time / ours"),
        "attention": Chart(
            "Attention beside cuDNN and FlashAttention", ("cuDNN / ours", "FlashAttention / ours"), "the other's time / ours"
        ),
        "cpu-kernels": Chart("CPU kernels beside NumPy", ("NumPy / ours",), "NumPy's time / ours"),
        "cpu-models": Chart("Exported models on a CPU", ("torch / ours", "onnxruntime / ours"), "the other's time / ours", table=1),
    }
)
COLOURS = ("#2f81d8", "#d9822b", "#5b9a3a")
"""Legible on light and on dark pages, as is the text's grey."""
TEXT = "#7d7d7d"
WIDTH, LABELS, ROW, TOP, BOTTOM = 860, 380, 22, 34, 44
_ENDS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def charts(root: Path) -> dict[str, str]:
    """Return every chart as SVG, by its path below docs/."""
    results = (root / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    return {f"figures/{name}.svg": drawn(chart, list(rows(chart, results))) for name, chart in CHARTS.items()}


def rows(chart: Chart, results: str) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield label and figures by column of each row of the chart's table; raise ValueError where there is no such table."""
    _, found, section = results.partition(f"\n## {chart.heading}\n")
    tables = re.findall(r"(?:^\|.*\n)+", re.split(r"^## ", section, flags=re.MULTILINE)[0], re.MULTILINE)
    if not found or len(tables) <= chart.table:
        raise ValueError(f"benchmarks/RESULTS.md has no table {chart.table} below {chart.heading!r}")
    head, _, *body = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in tables[chart.table].splitlines()]
    places = [head.index(column) for column in chart.columns]
    for cells in body:
        figures = [[float(text) for text in FIGURE.findall(cells[place])] if place < len(cells) else [] for place in places]
        if any(figures):
            yield cells[0], figures


def drawn(chart: Chart, table: Sequence[tuple[str, list[list[float]]]]) -> str:
    values = [value for _, figures in table for column in figures for value in column]
    low = max((end for end in _ENDS if end <= min(*values, chart.parity)), default=_ENDS[0])
    high = min((end for end in _ENDS if end >= max(*values, chart.parity)), default=_ENDS[-1])

    def x(value: float) -> float:
        share = math.log(value / low) / math.log(high / low)
        return round(LABELS + 16 + share * (WIDTH - LABELS - 40), 1)

    height = TOP + ROW * len(table) + BOTTOM
    style = f'font-family="system-ui, sans-serif" font-size="12" fill="{TEXT}" role="img" aria-label="{escape(chart.heading)}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {style}>',
        *_axis(chart, x, (low, high), height),
    ]
    for at, (label, figures) in enumerate(table):
        y = TOP + ROW * at + ROW / 2
        parts.append(f'<text x="{LABELS}" y="{y + 4}" text-anchor="end">{escape(_plain(label))}</text>')
        for colour, column in zip(COLOURS, figures, strict=False):
            parts += _dots(colour, [(x(value), value) for value in column], y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _plain(label: str) -> str:
    text = re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", lambda match: match[1] or "", label)
    return text if len(text) <= 54 else f"{text[:53]}…"


def _axis(chart: Chart, x: object, ends: tuple[float, float], height: int) -> Iterator[str]:
    assert callable(x)
    for end in (each for each in _ENDS if ends[0] <= each <= ends[1]):
        width = 1.6 if end == chart.parity else 0.5
        yield f'<line x1="{x(end)}" y1="{TOP - 4}" x2="{x(end)}" y2="{height - BOTTOM + 4}" stroke="{TEXT}" stroke-width="{width}"/>'
        yield f'<text x="{x(end)}" y="{height - BOTTOM + 20}" text-anchor="middle">{end:g}</text>'
    yield f'<text x="{WIDTH - 24}" y="{height - 8}" text-anchor="end">{escape(chart.axis)}, logarithmic</text>'
    for at, (colour, column) in enumerate(zip(COLOURS, chart.columns, strict=False)):
        yield f'<circle cx="{LABELS + 22 + 170 * at}" cy="14" r="5" fill="{colour}"/>'
        yield f'<text x="{LABELS + 32 + 170 * at}" y="18">{escape(column)}</text>'


def _dots(colour: str, places: Sequence[tuple[float, float]], y: float) -> Iterator[str]:
    if len(places) > 1:
        ends = sorted(place for place, _ in places)
        yield f'<line x1="{ends[0]}" y1="{y}" x2="{ends[-1]}" y2="{y}" stroke="{colour}" stroke-width="1.5" opacity="0.5"/>'
    for place, value in places:
        yield f'<circle cx="{place}" cy="{y}" r="4.5" fill="{colour}"><title>{value:g}</title></circle>'
