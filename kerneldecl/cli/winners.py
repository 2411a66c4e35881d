"""Owns the table that a build ends with: what has won, in which time, how near to the roofline, and what the entry took before.

Knows nothing of how a winner was found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kerneldecl.cli.table import table
from kerneldecl.compare.verdict import judge, noise_of
from kerneldecl.diagnostics.units import duration, share_of_peak, three_figures
from kerneldecl.model import Trial
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.planning.roofline import roofline_share
from kerneldecl.store.results import TuneResult

Json = dict[str, Any]
Before = Callable[[EntryPlan], TuneResult | None]
"""Gives the record by which an entry was built last; None where there is none."""
DEFAULT_TEMPLATE = "tvm_default"
"""The template of TVM's default schedules, which policy `default` proposes."""
_MOST_ROWS = 30
_LEFT_OUT = ("TVM's default", "of roofline")
"""Columns that a narrow window does without, the first one first."""


def winners_json(entries: Iterable[EntryPlan], before: Before) -> list[Json]:
    """Return what has won each entry that is tuned: time, share of what the roofline allows, and time before, where that is comparable."""
    return [_winner_json(entry, entry.tuned, before(entry)) for entry in entries if entry.tuned]


def _winner_json(entry: EntryPlan, tuned: TuneResult, before: TuneResult | None) -> Json:
    return {
        "entry": entry.entry,
        "winner": str(tuned.winner),
        "run_secs": tuned.run_secs,
        "measured": tuned.is_measured,
        "roofline_share": roofline_share(entry) if tuned.is_measured else None,
        "tied": tuned.tied,
        "before": _compared(tuned, before.trials[0]) if before and _is_comparable(tuned, before) else None,
        "default": _compared(tuned, default) if (default := _default(tuned)) else None,
    }


def _is_comparable(tuned: TuneResult, before: TuneResult) -> bool:
    """Say whether an earlier record is of another measurement of the same computation: the time of another one says nothing."""
    is_another = (before.key, before.run_secs) != (tuned.key, tuned.run_secs)
    return is_another and tuned.is_measured and before.is_measured and before.computation == tuned.computation


def _default(tuned: TuneResult) -> Trial | None:
    """Return TVM's default schedule, where it has competed and did not win."""
    found = [trial for trial in tuned.trials[1:] if trial.candidate.template == DEFAULT_TEMPLATE and trial.samples]
    return min(found, key=lambda trial: trial.run_secs, default=None)


def _compared(tuned: TuneResult, other: Trial) -> Json:
    """Return another kernel's time, and what of the difference to the winner is more than noise."""
    change = tuned.run_secs / other.run_secs - 1
    verdict = judge(change, noise_of(other.samples, tuned.trials[0].samples), budget=0.0)
    return {"run_secs": other.run_secs, "change": change, "verdict": verdict.value}


def winners_text(found: Sequence[Mapping[str, Any]], width: int) -> list[str]:
    """Return the table; columns that nobody has a figure for are left out."""
    if not found:
        return []
    columns: list[tuple[str, list[str]]] = [
        ("entry", [each["entry"] for each in found]),
        ("time", [_time(each) for each in found]),
        ("of roofline", [share_of_peak(each["roofline_share"]) for each in found]),
        ("before", [_against(each["before"]) for each in found]),
        ("TVM's default", [_against(each["default"]) for each in found]),
        ("winner", [_winner(each) for each in found]),
    ]
    kept = [(head, cells) for head, cells in columns if any(cells)]
    lines = _lines(kept, width)
    while width and max(map(len, lines)) > width and (dropped := next((name for name in _LEFT_OUT if name in dict(kept)), "")):
        kept = [(head, cells) for head, cells in kept if head != dropped]
        lines = _lines(kept, width)
    more = [f"and {len(found) - _MOST_ROWS} more: `kerneldecl show` lists all"] * (len(found) > _MOST_ROWS)
    return [*lines, *more]


def _lines(columns: Sequence[tuple[str, Sequence[str]]], width: int) -> list[str]:
    rows = list(zip(*(cells for _, cells in columns), strict=True))
    return table([head for head, _ in columns], rows[:_MOST_ROWS], width)


def _time(each: Mapping[str, Any]) -> str:
    return duration(each["run_secs"]) if each["measured"] else f"{duration(each['run_secs'])} expected"


def _against(other: Mapping[str, Any] | None) -> str:
    """Return another time and what became of it: `64.1 us, 1.06x faster`; no factor where noise alone may have made it."""
    if not other:
        return ""
    ratio = 1 + other["change"]
    factor = {"FASTER": f", {three_figures(1 / ratio)}x faster", "SLOWER": f", {three_figures(ratio)}x slower"}.get(
        other["verdict"], ", same"
    )
    return f"{duration(other['run_secs'])}{factor}"


def _winner(each: Mapping[str, Any]) -> str:
    """Return the winner's template, and how many others noise cannot tell from it; `show` has its parameters."""
    template = str(each["winner"]).partition("(")[0]
    return f"{template}, {each['tied']} tied" if each["tied"] else template
