"""Owns the table of entries: a row each, with what a reader compares, sorts and filters by.

Knows nothing of an entry's details.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kerneldecl.diagnostics.units import counted, duration
from kerneldecl.report.data import Entry, Report
from kerneldecl.report.svg import words


def table(report: Report, ids: Mapping[str, str]) -> str:
    """Return the table with what filters it."""
    whose = list(dict.fromkeys(other.name for entry in report.entries for other in entry.others))
    has_before = any(entry.change and entry.change.change is not None for entry in report.entries)
    heads = [("entry", False), ("time", True), ("of its roof", True)]
    heads += [(f"against {report.against}", True)] * has_before + [(f"{name} / ours", True) for name in whose]
    heads += [("policy", False), ("", False)]
    columns = "".join(_head(name, is_number) for name, is_number in heads)
    rows = "\n".join("".join(_row(entry, ids[entry.name], whose, has_before=has_before)) for entry in report.entries)
    return f"""<p class="note">A row opens what is known of an entry. Heads sort.</p>
<div class="tools"><label for="filter">Filter</label> <input id="filter" type="search" autocomplete="off">
<output id="count" for="filter">{len(report.entries)}</output> <button id="all" type="button">Open those shown (50 at most)</button></div>
<div class="wide"><table><thead><tr>{columns}</tr></thead><tbody>
{rows}
</tbody></table></div>"""


def _head(name: str, is_number: bool) -> str:
    if not name:
        return '<th scope="col">remarks</th>'
    return f'<th scope="col"{" data-number" if is_number else ""}><button type="button">{words(name)}</button></th>'


def _row(entry: Entry, anchor: str, whose: Sequence[str], *, has_before: bool) -> Iterator[str]:
    yield f'<tr id="{anchor}"><th scope="row"><button type="button" aria-expanded="false">{_breaking(entry.name)}</button></th>'
    yield _figure(f"{entry.run_secs:.4g}", duration(entry.run_secs)) if entry.run_secs else _figure("", "")
    yield _share(entry)
    if has_before:
        change = entry.change.change if entry.change else None
        kind = " slower" if entry.change and entry.change.fails else ""
        yield (
            _figure("", "new" if entry.change and not entry.change.before else "")
            if change is None
            else _figure(f"{change:.4f}", f"{change:+.1%}" if abs(change) >= 0.0005 else "0", kind)
        )
    ratios = {other.name: other.secs / other.our_secs for other in entry.others}
    yield from (_figure(f"{ratios[name]:.4f}", f"{ratios[name]:.2f}") if name in ratios else _figure("", "") for name in whose)
    yield f"<td>{words(entry.policy)}</td><td>{words(_remarks(entry))}</td></tr>"


def _breaking(name: str) -> str:
    """Return a name that may go on in the next line behind a comma, or with its brackets or its target."""
    return words(name).replace(",", ",<wbr>").replace("@", "<wbr>@").replace("[", "<wbr>[")


def _figure(value: str, shown: str, kind: str = "") -> str:
    return f'<td class="figure{kind}" data-v="{value}">{words(shown)}</td>'


def _share(entry: Entry) -> str:
    share = entry.share
    if share is None:
        return '<td data-v=""></td>'
    return f'<td class="figure" data-v="{share:.4f}"><i class="bar" style="--w:{min(share, 1):.0%}"></i><span>{share:.0%}</span></td>'


def _remarks(entry: Entry) -> str:
    if entry.reason:
        return f"no winner: {entry.reason}"
    told = [] if entry.is_measured else ["unmeasured"]
    tied = sum(each.is_tied for each in entry.tried) - 1
    failed = sum(bool(each.trial.failure) for each in entry.tried)
    told += [f"{tied} tied"] * (tied > 0) + [f"{counted(failed, 'candidate')} failed"] * bool(failed)
    return ", ".join(told)
