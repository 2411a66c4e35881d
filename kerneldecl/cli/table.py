"""Owns tables of text: columns that are aligned, a last column that is wrapped to the window, parameters folded to what differs.

Knows nothing of what stands in them.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_GAP = "  "
_LEAST_WIDTH = 24
"""Columns that the last one gets in any window."""
_CANDIDATE = re.compile(r"([\w.]+)\((.*)\)")


def window() -> int:
    """Return the columns of the terminal that standard output is; 0 for a file or a pipe, whose lines are not wrapped."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else 0


def table(head: Sequence[str], rows: Iterable[Sequence[str]], width: int, *, is_named: bool = True) -> list[str]:
    """Return the lines of a table of `width` columns at most, 0 for any: the last column to the left, and the first if it names rows.

    Names and the last column take several lines where the window is narrow. An empty head is left out.
    """
    cells = [*[tuple(head)] * bool(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if width and is_named and len(widths) > 1:
        others = sum(widths[1:-1]) + len(_GAP) * (len(widths) - 1) + min(widths[-1], _LEAST_WIDTH)
        widths[0] = min(widths[0], max(width - others, _LEAST_WIDTH))
    before = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
    room = max(width - before, _LEAST_WIDTH) if width else 0
    return [line for row in cells for line in _row_lines(row, widths, room, is_named=is_named)]


def _row_lines(row: Sequence[str], widths: Sequence[int], room: int, *, is_named: bool) -> Iterator[str]:
    """Yield a row's lines: the first with all its cells, more for what is left of the first and of the last."""
    names = name_lines(row[0], widths[0]) if is_named and len(row) > 1 else []
    last = wrapped(row[-1], room)
    middle = [cell.rjust(wide) for cell, wide in zip(row[len(names[:1]) : -1], widths[len(names[:1]) : -1], strict=True)]
    for at, (name, rest) in enumerate(itertools.zip_longest(names, last, fillvalue="")):
        between = middle if at == 0 else [" " * len(cell) for cell in middle]
        yield _GAP.join([*([name.ljust(widths[0])] if names else []), *between, rest]).rstrip()


def name_lines(name: str, width: int) -> list[str]:
    """Return an entry's name in lines of a width, broken in front of its attributes and behind their commas."""
    lines = [""]
    for part in re.split(r"(?<=,)|(?=[\[@])", name) if len(name) > width else [name]:
        if len(lines[-1] + part) <= width or not lines[-1].strip():
            lines[-1] += part
        else:
            lines.append(f"{_GAP}{part}")
    return lines


def wrapped(text: str, width: int) -> list[str]:
    """Return text in lines of a width, 0 for any; a longer word stays whole."""
    if not width:
        return [text]
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


@dataclass(frozen=True)
class Folded:
    """Candidates, with the parameters alone in which those of a template differ."""

    shared: tuple[str, ...]
    """A line for each template with the parameters that its candidates share."""
    names: tuple[str, ...]
    """Heads of the columns in which the candidates stand: parameters where all are of one template, else one column."""
    rows: tuple[tuple[str, ...], ...]
    """Cells of each candidate in these columns."""

    @property
    def in_one_column(self) -> Folded:
        if len(self.names) < 2:
            return self
        rows = ((" ".join(f"{name}={value}" for name, value in zip(self.names, row, strict=True)),) for row in self.rows)
        return Folded(self.shared, ("candidate",), tuple(rows))


def folded(candidates: Sequence[str]) -> Folded:
    """Return candidates such as `gemm(m=1 n=2)` without what all of a template share. Other texts stay whole."""
    split = [(match[1], tuple(match[2].split())) if (match := _CANDIDATE.fullmatch(each)) else (each, ()) for each in candidates]
    shared: dict[str, tuple[str, ...]] = {}
    for template, parameters in split:
        shared[template] = tuple(each for each in shared.get(template, parameters) if each in parameters)
    counts = Counter(template for template, _ in split)
    rest = [tuple(each for each in parameters if each not in shared[template]) for template, parameters in split]
    names = {tuple(each.partition("=")[0] for each in parameters) for parameters in rest}
    if len(counts) == 1 and len(split) > 1 and len(names) == 1 and any(rest):
        rows = [tuple(each.partition("=")[2] for each in parameters) for parameters in rest]
        return Folded((f"all {' '.join((split[0][0], *shared[split[0][0]]))}",), names.pop(), tuple(rows))
    several = {template for template, count in counts.items() if count > 1 and shared[template]}
    short = [
        f"{template}({' '.join(parameters)})" if template in several else whole
        for (template, _), parameters, whole in zip(split, rest, candidates, strict=True)
    ]
    lines = tuple(f"all {template} have {' '.join(shared[template])}" for template in counts if template in several)
    return Folded(lines, ("candidate",), tuple((each,) for each in short))
