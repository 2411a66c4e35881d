"""Owns what a log of events says of time: spans of the build, of entries and of processes; a Chrome trace and figures of them.

Knows nothing of files, or of who shows them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Line = Mapping[str, Any]
BUILD, ENTRIES = "build", "entries"


class Span(NamedTuple):
    """A piece of time: seconds since the epoch, and how many."""

    name: str
    track: str
    """`build`, `entries`, or the process that was busy."""
    began: float
    secs: float
    fields: Mapping[str, Any]


def spans(lines: Sequence[Line]) -> list[Span]:
    """Return the spans of a log, as far as it goes: the build first, then its entries, then what processes did."""
    if not lines:
        return []
    first, last = float(lines[0]["at"]), float(lines[-1]["at"])
    ended = next((line for line in lines if line["event"] == "ended"), {"failure": "cut off"})
    failure = {"failure": ended["failure"]} if ended["failure"] else {}
    return [Span(BUILD, BUILD, first, last - first, failure), *_entries(lines, last), *_requests(lines)]


def _entries(lines: Sequence[Line], last: float) -> list[Span]:
    began = {line["entry"]: line for line in lines if line["event"] == "begun"}
    ended = {line["entry"]: line for line in lines if line["event"] == "finished" and line["entry"] in began}
    found = []
    for entry, line in began.items():
        end = ended.get(entry, {"at": last, "kind": "tune", "text": "cut off"})
        found.append(Span(entry, ENTRIES, line["at"], max(0.0, end["at"] - line["at"]), {"kind": end["kind"], "text": end["text"]}))
    return found


def _requests(lines: Sequence[Line]) -> list[Span]:
    """Return what processes did, each with the entries that its computation was for."""
    entries: dict[str, list[str]] = {}
    for line in lines:
        if line["event"] == "begun":
            entries.setdefault(line["computation"], []).append(line["entry"])
    found = []
    for line in (line for line in lines if line["event"] == "ran"):
        whose = {"entries": entries[line["computation"]]} if line["computation"] in entries else {}
        failure = {"failure": line["failure"]} if line["failure"] else {}
        found.append(Span(line["request"], line["process"], line["began"], line["secs"], {**whose, **failure}))
    return found


def chrome_trace(found: Sequence[Span]) -> dict[str, Any]:
    """Return a trace for chrome://tracing and Perfetto: a track for the build, one for each entry in flight, one for each process.

    The format is "Trace Event Format" of the Chromium project: complete events, times in microseconds.
    """
    placed = [(span, track) for track, several in _tracks(found).items() for span in several]
    names = list(dict.fromkeys(track for _, track in placed))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": names.index(name), "args": {"name": name}} for name in names
    ]
    start = min((span.began for span in found), default=0.0)
    for span, track in placed:
        times = {"ts": round((span.began - start) * 1e6, 1), "dur": round(span.secs * 1e6, 1)}
        events.append(
            {"ph": "X", "name": span.name, "cat": span.track.split()[0], "pid": 1, "tid": names.index(track), **times} | _args(span)
        )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"began": start}}


def _args(span: Span) -> dict[str, Any]:
    return {"args": dict(span.fields)} if span.fields else {}


def _tracks(found: Iterable[Span]) -> dict[str, list[Span]]:
    """Return spans by track; entries that overlap stand on several, since a track holds one thing at a time."""
    tracks: dict[str, list[Span]] = {}
    for span in sorted(found, key=lambda span: span.began):
        track, number = span.track, 1
        while span.track == ENTRIES and track in tracks and tracks[track][-1].began + tracks[track][-1].secs > span.began:
            number += 1
            track = f"{ENTRIES} {number}"
        tracks.setdefault(track, []).append(span)
    return tracks


def summary(found: Sequence[Span]) -> dict[str, Any]:
    """Return how long the build took, what processes were asked and for how long, and how busy each was."""
    build = next(span for span in found if span.track == BUILD)
    asked: dict[str, list[Span]] = {}
    busy: dict[str, list[Span]] = {}
    for span in (span for span in found if span.track not in {BUILD, ENTRIES}):
        asked.setdefault(span.name.split()[0], []).append(span)
        busy.setdefault(span.track, []).append(span)
    requests = [{"request": name, **_figures(several)} for name, several in sorted(asked.items())]
    processes = [
        {"process": name, "requests": len(several), "busy": round(sum(s.secs for s in several) / max(build.secs, 1e-9), 4)}
        for name, several in sorted(busy.items())
    ]
    entries = [{"entry": s.name, "secs": round(s.secs, 3), **s.fields} for s in found if s.track == ENTRIES]
    failure = build.fields.get("failure", "")
    return {"schema": 1, "secs": round(build.secs, 3), "failure": failure, "requests": requests, "processes": processes, "entries": entries}


def _figures(several: Sequence[Span]) -> dict[str, Any]:
    secs = [span.secs for span in several]
    figures = {"secs": sum(secs), "median_secs": statistics.median(secs), "longest_secs": max(secs)}
    failed = sum("failure" in span.fields for span in several)
    return {"count": len(secs), "failed": failed, **{name: round(value, 4) for name, value in figures.items()}}
