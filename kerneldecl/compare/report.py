"""Owns how comparisons are shown: a table for people, JSON, JUnit for a CI, Markdown for a comment on a change.

Knows nothing of how verdicts are reached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import quoteattr

from kerneldecl.compare.verdict import Comparison, Measured, Verdict
from kerneldecl.diagnostics.units import counted, duration
from kerneldecl.errors import printable
from kerneldecl.timing import median

_ORDER = (Verdict.SLOWER, Verdict.MISSING, Verdict.UNVERIFIED, Verdict.UNSURE, Verdict.FASTER, Verdict.NEW, Verdict.SAME)
_LEFT_OUT = ("winner", "code", "otherwise", "noise", "reason")
_HEAD = ("verdict", "entry", "before", "after", "change", "noise", "otherwise", "winner", "code", "reason")


def summary(compared: Sequence[Comparison]) -> str:
    """Return one line: how many entries of each verdict there are."""
    counts = Counter(each.verdict for each in compared)
    return f"{counted(len(compared), 'entry', 'entries')}: " + (
        ", ".join(f"{counts[verdict]} {verdict}" for verdict in _ORDER if counts[verdict]) or "none"
    )


def table(compared: Sequence[Comparison], *, is_whole: bool = False, width: int = 0) -> str:
    """Return lines for a terminal of `width` columns, 0 for any; entries of which nothing has changed are counted only, unless `is_whole`.

    Columns that are empty are left out, and in a narrow window those of the code as far as need be.
    """
    rows = [_cells(each) for each in (compared if is_whole else _worth_a_line(compared))]
    columns = {name: cells for name, *cells in zip(_HEAD, *rows, strict=False) if any(cells)}
    for name in _LEFT_OUT if width else ():
        if _width(columns) > width:
            columns.pop(name, None)
    widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
    listed = [tuple(columns), *zip(*columns.values(), strict=True)] if rows else []
    lines = ["  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True)).rstrip() for row in listed]
    return "\n".join([*lines, summary(compared)])


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(len, (name, *cells))) + 2 for name, cells in columns.items()) - 2


def markdown(compared: Sequence[Comparison]) -> str:
    """Return a table in Markdown, the entries that fail first."""
    rows = [_cells(each) for each in _worth_a_line(compared)]
    head = [f"| {' | '.join(_HEAD)} |", f"|{'---|' * len(_HEAD)}"] if rows else []
    lines = [f"| {' | '.join(_in_markdown(cell) for cell in row)} |" for row in rows]
    verdict = "**kerneldecl gate: failed**" if any(each.fails for each in compared) else "**kerneldecl gate: passed**"
    return "\n".join([f"{verdict}, {summary(compared)}", *([""] * bool(rows)), *head, *lines])


def junit(compared: Sequence[Comparison]) -> str:
    """Return a JUnit report: a test for each entry."""
    failures = sum(each.fails for each in compared)
    cases = "".join(_case(each) for each in compared)
    suite = f'<testsuite name="kerneldecl gate" tests="{len(compared)}" failures="{failures}">\n{cases}</testsuite>'
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{suite}'


def _case(each: Comparison) -> str:
    name = f"<testcase classname={quoteattr('kerneldecl.gate')} name={quoteattr(printable(each.name))}"
    if not each.fails:
        return f"  {name}/>\n"
    said = "; ".join(filter(None, [str(each.verdict), *_cells(each)[2:5], each.reason]))
    return f"  {name}><failure message={quoteattr(printable(said))}/></testcase>\n"


def to_json(compared: Sequence[Comparison], budget: float) -> dict[str, Any]:
    """Return all comparisons as JSON values."""
    entries = [
        {
            "name": each.name,
            "verdict": each.verdict.value,
            "fails": each.fails,
            "before": _side(each.before),
            "after": _side(each.after),
            "change": each.change,
            "noise": each.uncertainty,
            "otherwise": dict(each.otherwise),
            "reason": each.reason,
        }
        for each in compared
    ]
    return {"schema": 1, "budget": budget, "passed": not any(each.fails for each in compared), "entries": entries}


def _side(measured: Measured | None) -> Mapping[str, Any] | None:
    if measured is None:
        return None
    return {
        "key": measured.key,
        "winner": measured.winner,
        "run_secs": measured.run_secs,
        "samples": len(measured.samples),
        "timing": measured.timing,
        "timings": {protocol: median(samples) for protocol, samples in measured.timings if samples},
        "verified": measured.is_verified,
        "object": measured.code,
    }


def _worth_a_line(compared: Sequence[Comparison]) -> list[Comparison]:
    def is_as_it_was(each: Comparison) -> bool:
        return each.verdict is Verdict.SAME and not each.reason

    return sorted((each for each in compared if not is_as_it_was(each)), key=lambda each: (_ORDER.index(each.verdict), each.name))


def _cells(each: Comparison) -> tuple[str, ...]:
    before, after = each.before, each.after
    change = "" if each.change is None else f"{each.change:+.1%}"
    noise = "" if each.uncertainty is None else f"{each.uncertainty:.1%}"
    winner = _changed(before, after, lambda side: side.winner, "same")
    code = _changed(before, after, lambda side: side.code[:8], "same")
    otherwise = ", ".join(f"{protocol} {found:+.1%}" for protocol, found in each.otherwise)
    return (str(each.verdict), each.name, _time(before), _time(after), change, noise, otherwise, winner, code, each.reason)


def _changed(before: Measured | None, after: Measured | None, what: Callable[[Measured], str], same: str) -> str:
    old, new = what(before) if before else "", what(after) if after else ""
    return (same if new else "") if old == new else f"{old} -> {new}" if old and new else new or old


def _time(measured: Measured | None) -> str:
    return "" if measured is None or measured.run_secs is None else duration(measured.run_secs)


def _in_markdown(cell: str) -> str:
    return printable(cell).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`")


FORMATS: Mapping[str, Callable[[Sequence[Comparison]], str]] = {"junit": junit, "markdown": markdown}
"""Formats for machines, by name; a table is for people."""
