"""Owns the parts of the page above the entries: rooflines, what changed, others' times, models, history, searches, the build. HTML.

Knows nothing of how each is drawn, or of the page around them. A part of which nothing is known says how that comes about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kerneldecl.compare.verdict import Verdict
from kerneldecl.diagnostics.units import amount, counted, duration
from kerneldecl.report import models
from kerneldecl.report.data import Entry, Report
from kerneldecl.report.entries import OTHERS
from kerneldecl.report.history import courses, history
from kerneldecl.report.ratios import Ratio, ratios
from kerneldecl.report.roofline import has_place, roofline
from kerneldecl.report.searches import searched, searches
from kerneldecl.report.svg import words
from kerneldecl.report.timeline import timeline

Section = tuple[str, str, str]
"""Anchor, title and HTML."""
_MOST_CHANGES = 100
_MOST_NAMED = 6
_ALWAYS = 0.002
"""Relative change of time below which an entry is not drawn among those that changed."""


_DOTS = "Each dot is an entry's winner. Point at one, or reach it by Tab and arrow keys, for its figures; follow it to its candidates."


_WARM = "Caches are warm on a CPU: kernels whose arrays fit into them pass the line of the memory."


def sections(report: Report, ids: Mapping[str, str]) -> list[Section]:
    """Return the parts that are of use for this report, in the page's order."""
    found = [
        ("roofline", "Roofline", "".join(_rooflines(report, ids))),
        ("changes", "What changed", "".join(_changes(report))),
        ("others", "Beside other kernels", "".join(_others(report.entries))),
        ("models", "Models", "".join(_models(report.entries))),
        ("history", "History", _history(report)),
        ("searches", "Searches", _searches(report.entries)),
        ("build", "The last build", _build(report)),
    ]
    return [section for section in found if section[2]]


def _rooflines(report: Report, ids: Mapping[str, str]) -> Iterator[str]:
    for target in report.targets:
        entries = [entry for entry in report.entries if entry.target == target.name and entry.run_secs]
        placed = [entry for entry in entries if has_place(entry)]
        if len(report.targets) > 1:
            yield f"<h3>{words(target.name)}: {words(target.device)}</h3>"
        if placed:
            yield f'<p class="note">{_DOTS}</p>'
            yield _wide(roofline(placed, ids), "")
        if placed and target.is_warm:
            yield f'<p class="note">{_WARM}</p>'
        if others := [entry for entry in entries if not has_place(entry) and entry.roofline]:
            told = "; ".join(f'<a href="#{ids[entry.name]}">{words(entry.name)}</a> {_bandwidth(entry)}' for entry in others[:_MOST_NAMED])
            more = f"; and {len(others) - _MOST_NAMED} more" * (len(others) > _MOST_NAMED)
            yield f'<p class="note">Without arithmetic, by DRAM bandwidth: {told}{more}.</p>'
        if not entries:
            yield "<p>Nothing is measured yet: <code>kerneldecl build</code> measures.</p>"


def _bandwidth(entry: Entry) -> str:
    assert entry.roofline is not None, "it is tuned"
    rate = entry.roofline.least_bytes / entry.run_secs
    return f"{amount(rate, 'B/s')}, {rate / entry.roofline.dram_bytes_per_s:.0%}"


def _wide(drawing: str, caption: str) -> str:
    """Return a drawing that scrolls where the window is narrower than its letters allow."""
    said = f"<figcaption>{words(caption)}</figcaption>" if caption else ""
    return f'<figure><div class="wide" tabindex="0" role="group" aria-label="Drawing">{drawing}</div>{said}</figure>'


def _changes(report: Report) -> Iterator[str]:
    if not report.against:
        return
    found = [entry for entry in report.entries if entry.change]
    counts = {verdict: sum(entry.change is not None and entry.change.verdict is verdict for entry in found) for verdict in Verdict}
    told = ", ".join(f"{count} {str(verdict).lower()}" for verdict, count in counts.items() if count)
    gone = f", {len(report.gone)} gone: {', '.join(report.gone[:5])}" if report.gone else ""
    yield f"<p>Against {words(report.against)}: {words(told + gone)}.</p>"
    moved = [
        Ratio(entry.name.partition("@")[0], 1 / (1 + change.change), f"{_time(change.before.run_secs)} → {_time(change.after.run_secs)}")
        for entry in found
        if (change := entry.change) and change.change is not None and abs(change.change) >= _ALWAYS and change.before and change.after
    ]
    if moved:
        label = f"Time at {report.against}, divided by that of now"
        yield _wide(
            ratios(moved, label, "slower now", "faster now"),
            f"{label}, of {counted(len(moved), 'entry', 'entries')} whose time is another.",
        )
    rows = [entry for entry in found if entry.change and (entry.change.verdict is not Verdict.SAME or entry.change.reason)]
    if rows:
        heads = "".join(f'<th scope="col">{head}</th>' for head in ("verdict", "entry", "before", "now", "change", "noise", "because of"))
        body = "\n".join(map(_change, rows[:_MOST_CHANGES]))
        more = f'<p class="note">{len(rows) - _MOST_CHANGES} more.</p>' * (len(rows) > _MOST_CHANGES)
        yield f"<details><summary>{counted(len(rows), 'entry', 'entries')} with another input, time or verdict</summary>"
        yield '<div class="wide" tabindex="0" role="group" aria-label="Changes">'
        yield f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{more}</details>"


def _change(entry: Entry) -> str:
    change = entry.change
    assert change is not None, "it is compared"
    before, after = (_time(side.run_secs) if side else "" for side in (change.before, change.after))
    figures = ("" if value is None else f"{value:{form}}" for value, form in ((change.change, "+.1%"), (change.uncertainty, ".1%")))
    cells = (str(change.verdict).lower(), entry.name, before, after, *figures, change.reason)
    return f"<tr>{''.join(f'<td>{words(cell)}</td>' for cell in cells)}</tr>"


def _time(secs: float | None) -> str:
    return "" if secs is None else duration(secs)


def _others(entries: Sequence[Entry]) -> Iterator[str]:
    names = dict.fromkeys(other.name for entry in entries for other in entry.others)
    for name in names:
        pairs = [(entry, other) for entry in entries for other in entry.others if other.name == name]
        found = [
            Ratio(entry.name.partition("@")[0], other.secs / other.our_secs, f"{duration(other.secs)} / {duration(other.our_secs)}")
            for entry, other in pairs
        ]
        whose = OTHERS.get(name, name)
        label = f"Time of {whose}, divided by ours"
        yield f"<h3>{words(whose[0].upper() + whose[1:])}</h3>"
        yield _wide(ratios(found, label, "ours is slower", "ours is faster"), f"{label}, both of one race.")
    if not names and any(entry.run_secs for entry in entries):
        yield "<p>No time of a vendor's library or of TVM's default schedules is known. These are raced with ours, and shown here, by</p>"
        yield '<pre tabindex="0" role="group" aria-label="Commands">'
        yield "kerneldecl compare --policies auto,library,default --json &gt; searches.json\n"
        yield "kerneldecl report --searches searches.json</pre>"


def _models(entries: Sequence[Entry]) -> Iterator[str]:
    found = models.models(entries)
    if not found:
        return
    yield '<p class="note">For each policy, left: its predicted time over the measured one; on the line they agree; dark dots are winners. '
    yield "Right: how near the best of its first k candidates comes to the fastest of all.</p>"
    yield '<div class="policies both">'
    for model in found:
        second = models.best_of(model) if model.best_of else ""
        drawings = f'<div class="pair">{models.predictions(model)}{second}</div>'
        yield f"<figure><h3>{words(model.policy)}</h3>{drawings}<figcaption>{words(models.summary(model))}.</figcaption></figure>"
    yield "</div>"


def _history(report: Report) -> str:
    found = courses(report.entries)
    if len(report.revisions) < 2 or not found:
        return ""
    count = counted(len(report.revisions) - 1, "git revision")
    caption = f"Times in {count} of workloads.lock and now, each entry's relative to its first: below 1 it has become faster."
    return _wide(history(found, report.revisions), caption)


def _searches(entries: Sequence[Entry]) -> str:
    found = searched(entries)
    if not found:
        return ""
    count = sum(map(len, found.values()))
    return _wide(
        searches(found), f"Best time known in {counted(count, 'search', 'searches')}, relative to the best of any search of the entry."
    )


def _build(report: Report) -> str:
    if not report.built or not report.built.busy:
        return ""
    failed = sum(each.has_failed for each in report.built.busy)
    ending = f", ended by {report.built.failure}" if report.built.failure else ""
    told = f"{duration(report.built.secs)}, {counted(len(report.built.busy), 'request')}, {failed} failed{ending}."
    told += " Filled is busy; compiling, asking policies and measuring have an ink each."
    return _wide(timeline(report.built), told)
