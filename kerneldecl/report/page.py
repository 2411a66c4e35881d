"""Owns the page: a report as one HTML file that needs nothing else, its parts in their order, its style and its script.

Knows nothing of where the report comes from. The details of entries lie in the page compressed, and are unpacked where one is opened.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kerneldecl.report.data import Entry, Report
from kerneldecl.report.entry import detail
from kerneldecl.report.sections import sections
from kerneldecl.report.svg import words
from kerneldecl.report.table import table

PIECE = 16
"""Entries whose details are compressed together: they resemble each other, and unpacking takes no time."""
MOST_BYTES = 3_000_000
"""Sources are left out, those of the last entries first, where the file would be larger."""
_HERE = Path(__file__).parent


def page(report: Report) -> str:
    """Return a report as an HTML file."""
    ids = {entry.name: f"e{place}" for place, entry in enumerate(report.entries)}
    found = sections(report, ids)
    parts = [
        *_opening(report, [(anchor, title) for anchor, title, _ in found]),
        *(_section(anchor, title, body) for anchor, title, body in found),
        _section("entries", "Entries", table(report, ids)),
        '<div id="tip" hidden></div>',
    ]
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    head, front = _head(report, script), "\n".join(parts)
    room = MOST_BYTES - len(head.encode()) - len(front.encode()) - len(script)
    packed = "\n".join(f'<script type="text/plain" id="p{place}">{each}</script>' for place, each in enumerate(_pieces(report, room)))
    return f'{head}<body data-piece="{PIECE}">\n{front}\n{packed}\n<script>{script}</script>\n</body>\n</html>\n'


def _head(report: Report, script: str) -> str:
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{allowed}'"
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{words(report.title)}: kernels</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{style}</style>\n</head>\n"
    )


def _opening(report: Report, found: Sequence[tuple[str, str]]) -> Iterator[str]:
    devices = "; ".join(f"{target.name}: {target.device}" for target in report.targets)
    yield f'<header><h1>{words(report.title)}</h1><p class="lead">{words(devices)}</p>'
    yield f'<ul class="facts">{"".join(f"<li><b>{words(figure)}</b>{words(told)}</li>" for figure, told in facts(report))}</ul>'
    links = "".join(f'<li><a href="#{anchor}">{words(title)}</a></li>' for anchor, title in (*found, ("entries", "Entries")))
    yield f'<nav aria-label="Sections"><ul>{links}</ul></nav></header><main>'
    yield "<noscript><p>Details of entries need JavaScript.</p></noscript>"


def _section(anchor: str, title: str, body: str) -> str:
    return f'<section id="{anchor}"><h2>{words(title)}</h2>\n{body}\n</section>' + "</main>" * (anchor == "entries")


def _pieces(report: Report, room: int) -> Iterator[str]:
    """Yield the compressed details; with sources while there is room for what is to come without them."""
    plain = [_packed(group, report) for group in _groups(report.entries, has_source=False)]
    if not any(entry.source for entry in report.entries):
        yield from plain
        return
    spare = room - sum(map(len, plain))
    for group, without in zip(_groups(report.entries, has_source=True), plain, strict=True):
        whole = _packed(group, report) if spare > 0 else without
        spare -= len(whole) - len(without)
        yield whole if spare > 0 else without


def _groups(entries: Sequence[Entry], *, has_source: bool) -> Iterable[Sequence[Entry]]:
    told = entries if has_source else [replace(entry, source="") if entry.source else entry for entry in entries]
    return [told[place : place + PIECE] for place in range(0, len(told), PIECE)]


def _packed(entries: Sequence[Entry], report: Report) -> str:
    content = "\0".join(detail(entry, report.revisions) for entry in entries).encode()
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    return base64.b64encode(packer.compress(content) + packer.flush()).decode()


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the figures at the top, each with its words."""
    entries = report.entries
    measured = [entry for entry in entries if entry.run_secs]
    yield str(len(entries)), "entries" if len(entries) != 1 else "entry"
    if measured:
        yield f"{len(measured)}", "measured"
        shares = [entry.share for entry in measured if entry.share]
        yield f"{_mean(shares):.0%}", "of the roofline, geometric mean"
    if without := sum(bool(entry.reason) for entry in entries):
        yield str(without), "without a winner"
    for name, count in _verdicts(entries).items():
        yield str(count), f"{name} than {report.against}"
    if report.built:
        yield f"{report.built.secs:.1f} s", "the last build that had anything to do"


def _mean(shares: Sequence[float]) -> float:
    from kerneldecl.tuning.model_rank import geometric_mean

    return geometric_mean(shares)


def _verdicts(entries: Sequence[Entry]) -> Mapping[str, int]:
    found = sorted(str(entry.change.verdict).lower() for entry in entries if entry.change)
    return {name: len(list(group)) for name, group in itertools.groupby(found) if name in {"faster", "slower"}}
