"""Owns what the page tells of one entry: its figures, its candidates with their samples, its history, its source, as HTML.

Knows nothing of when the page shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kerneldecl.diagnostics.units import amount, counted, duration
from kerneldecl.model import Candidate, shown_value
from kerneldecl.report.data import Entry, Revision, Tried
from kerneldecl.report.scale import Linear
from kerneldecl.report.searches import own_search
from kerneldecl.report.svg import TIMES, number, words
from kerneldecl.timing import median
from kerneldecl.tuning.race import NOISE

_STRIP = Linear(0.985, 1.08, 0.0, 220.0)
"""Axis of a candidate's samples, as multiples of the fastest: beyond its end, candidates did not come near the final."""
_BAND = (
    '<svg viewBox="0 0 220 20" width="220" height="20" aria-hidden="true">'
    f'<path class="tie" d="M{number(_STRIP(1.0))} 0H{number(_STRIP(1.0 + NOISE))}V20H{number(_STRIP(1.0))}z"/>'
)


def detail(entry: Entry, revisions: Sequence[Revision]) -> str:
    """Return an entry's details."""
    return "".join([*_head(entry), *_candidates(entry), *_searches(entry), *_history(entry, revisions), *_source(entry)])


def _head(entry: Entry) -> Iterator[str]:
    facts = [("rule", f"{entry.rule} {entry.attrs}")]
    if entry.reason:
        facts.append(("not tuned", entry.reason))
    if roofline := entry.roofline:
        work = f"{amount(roofline.flops, 'FLOP')}, at least {amount(roofline.least_bytes, 'B')} of memory traffic"
        facts.append(("work", f"{work}; at best {duration(roofline.least_secs)} by peak and bandwidth"))
    if entry.conditions:
        facts.append(("measured", f"{entry.timing}, on {', '.join(value for _, value in entry.conditions)}"))
    facts += [(other.name, f"{duration(other.secs)}, {other.secs / other.our_secs:.2f} of our time") for other in entry.others]
    if (change := entry.change) and change.before and change.reason:
        facts.append(("inputs changed", change.reason))
    if entry.why:
        facts.append(("last built", ". ".join(entry.why)))
    yield f"<dl>{''.join(f'<dt>{words(name)}</dt><dd>{words(told)}</dd>' for name, told in facts)}</dl>"


def _candidates(entry: Entry) -> Iterator[str]:
    measured = [each for each in entry.tried if each.trial.samples]
    failed = [each for each in entry.tried if not each.trial.samples]
    if measured:
        yield from _table(measured)
    if failed:
        told = [(each, each.trial.failure or "not measured") for each in failed]
        yield f"<h3>{counted(len(failed), 'candidate')} without a time</h3><ul>"
        yield from (f"<li><code>{words(str(each.trial.candidate))}</code> {words(why)}</li>" for each, why in told)
        yield "</ul>"


def _table(measured: Sequence[Tried]) -> Iterator[str]:
    shared, names, rows = folded([each.trial.candidate for each in measured])
    # Among those that came to the final; of the others a few samples may say less.
    fastest = min(each.trial.run_secs for place, each in enumerate(measured) if each.is_tied or not place)
    ties = sum(each.is_tied for each in measured)
    note = f"The band is the {NOISE:.1%} from the fastest median on that noise can hide"
    note += f"; = marks {ties} that noise cannot tell apart, of which the policy's first wins." if ties > 1 else "."
    note += " Where no error stands, today's reference has not been asked." if any(each.trial.error is None for each in measured) else ""
    has_device = any(each.trial.registers for each in measured)
    heads = ["samples", "time", "predicted", *(["reg", "smem", "spills"] if has_device else []), "error", *names]
    yield f'<p class="note">{words(shared)}{note} A strip ends {_STRIP.high - 1:.0%} above the fastest.</p>'
    yield '<div class="wide" tabindex="0" role="group" aria-label="Candidates"><table class="candidates"><thead><tr><th>'
    yield f'<span class="off">place</span></th>{"".join(f"<th>{words(head)}</th>" for head in heads)}</tr></thead><tbody>'
    for place, (each, cells) in enumerate(zip(measured, rows, strict=True)):
        mark = "★" if not place else "=" if each.is_tied else ""
        said = "winner" if not place else "tied" if each.is_tied else str(place + 1)
        figures = [duration(each.trial.run_secs), duration(each.trial.predicted_secs), *(_device(each) if has_device else ())]
        figures.append("" if each.trial.error is None else f"{each.trial.error:.1e}")
        yield f'<tr><th><span aria-hidden="true">{mark}</span><span class="off">{said}</span></th>'
        yield f"<td>{strip(each.trial.samples, fastest)}</td>"
        yield "".join(f"<td>{words(cell)}</td>" for cell in (*figures, *cells)) + "</tr>"
    yield "</tbody></table></div>"


def _device(each: Tried) -> tuple[str, str, str]:
    spills = f"{each.trial.spill_bytes} B" if each.trial.spill_bytes else "none"
    return str(each.trial.registers), _bytes(each.trial.smem_bytes), spills


def _bytes(count: int) -> str:
    return f"{count} B" if count < 1000 else amount(count, "B")


def strip(samples: Sequence[float], fastest: float) -> str:
    """Return samples as dots on a line with the tie band and their median, as SVG; where the median is beyond its end, by how much."""
    middle = median(samples) / fastest
    if middle > _STRIP.high:
        return f'{_BAND}<text x="{number(_STRIP.end - 2)}" y="14" text-anchor="end" class="tick">{middle:.2f}{TIMES} →</text></svg>'
    if middle < _STRIP.low:
        return f'{_BAND}<text x="2" y="14" class="tick">← {middle:.2f}{TIMES}</text></svg>'
    # Hundreds of thousands of samples: not a call for each.
    places = {round((each / fastest - _STRIP.low) * _STRIP.slope) for each in samples}
    spots = "".join([f"M{at} 10h0" for at in sorted(places) if 0 <= at <= _STRIP.end])
    return f'{_BAND}<path class="sample" d="{spots}"/><path class="middle" d="M{_STRIP(middle):.0f} 3v14"/></svg>'


def folded(candidates: Sequence[Candidate]) -> tuple[str, list[str], list[list[str]]]:
    """Return what candidates share as a sentence, the names of the columns in which they differ, and their cells."""
    templates = {each.template for each in candidates}
    params = [dict(each.params) for each in candidates]
    names = list(dict.fromkeys(name for each in params for name in each))
    differing = [name for name in names if len({each.get(name) for each in params}) > 1]
    same = " ".join(f"{name}={shown_value(params[0][name])}" for name in names if name not in differing)
    cells = [[shown_value(each[name]) if name in each else "" for name in differing] for each in params]
    if len(templates) == 1:
        return f"All are {templates.pop()}{f' with {same}' * bool(same)}. ", differing, cells
    rows = [
        [each.template, " ".join(f"{name}={cell}" for name, cell in zip(differing, row, strict=True) if cell)]
        for each, row in zip(candidates, cells, strict=True)
    ]
    return f"All have {same}. " * bool(same), ["template", "parameters"], rows


def _searches(entry: Entry) -> Iterator[str]:
    if entry.searches:
        yield f"<h3>Best time known over the seconds of its search</h3>{own_search(entry.searches)}"


def _history(entry: Entry, revisions: Sequence[Revision]) -> Iterator[str]:
    """Yield the revisions in which its time has changed."""
    changed: list[tuple[Revision, float]] = []
    for revision, secs in zip(revisions, entry.history, strict=False):
        if secs and (not changed or abs(secs / changed[-1][1] - 1) > 1e-3):
            changed.append((revision, secs))
    if len(changed) > 1:
        rows = "".join(
            f'<tr><td class="short">{words(each.date)}</td><td class="short">{duration(secs)}</td>'
            f"<td>{words(each.digest)} {words(each.subject)}</td></tr>"
            for each, secs in changed
        )
        yield f"<h3>Times in the lock's revisions</h3><table><tbody>{rows}</tbody></table>"


def _source(entry: Entry) -> Iterator[str]:
    if entry.source:
        lines = entry.source.count("\n") + 1
        summary = f"Scheduled TensorIR of the winner, {counted(lines, 'line')}"
        body = words_of_lines(entry.source)
        yield f'<details><summary>{summary}</summary><pre tabindex="0" role="group" aria-label="Scheduled TensorIR">{body}</pre></details>'
    elif entry.tried:
        yield f"<p class=\"note\">Source of the winner: <code>kerneldecl show --source '{words(entry.name)}'</code></p>"


def words_of_lines(source: str) -> str:
    return "\n".join(map(words, source.split("\n")))
