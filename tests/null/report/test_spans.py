"""Owns the tests of what a log of events says of time: tracks of a trace, figures, logs that are cut off.

Knows nothing of builds.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from kerneldecl.cli.event_log import EventLog, read_log
from kerneldecl.report.spans import chrome_trace, spans, summary
from kerneldecl.tuning.events import Begun, Finished, Ran, Step

LINES: list[dict[str, Any]] = [
    {"event": "log", "at": 100.0, "schema": 1},
    {"event": "begun", "at": 101.0, "entry": "a@box", "computation": "c1"},
    {
        "event": "ran",
        "at": 103.0,
        "request": "build tiled",
        "process": "compile 7",
        "began": 101.0,
        "secs": 2.0,
        "computation": "c1",
        "failure": "",
    },
    {"event": "begun", "at": 102.0, "entry": "b@box", "computation": "c1"},
    {
        "event": "ran",
        "at": 103.5,
        "request": "build tiled",
        "process": "compile 8",
        "began": 102.5,
        "secs": 1.0,
        "computation": "",
        "failure": "no",
    },
    {"event": "finished", "at": 104.0, "entry": "a@box", "kind": "tune", "text": "tiled() 1 us", "has_failed": False},
    {"event": "finished", "at": 105.0, "entry": "b@box", "kind": "tune", "text": "none passed", "has_failed": True},
    {"event": "ended", "at": 110.0, "secs": 10.0, "failure": ""},
]


def test_a_trace_has_a_track_for_each_process_and_for_each_entry_in_flight() -> None:
    events = chrome_trace(spans(LINES))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    pieces = [(names[e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in events if e["ph"] == "X"]
    assert sorted(pieces) == [
        ("build", "build", 0.0, 10.0),
        ("compile 7", "build tiled", 1.0, 2.0),
        ("compile 8", "build tiled", 2.5, 1.0),
        ("entries", "a@box", 1.0, 3.0),
        ("entries 2", "b@box", 2.0, 3.0),
    ]
    (told,) = [event["args"] for event in events if event["ph"] == "X" and names[event["tid"]] == "compile 7"]
    assert told == {"entries": ["a@box", "b@box"]}, "one computation may be that of several entries"


def test_a_summary_has_figures_by_request_and_by_process() -> None:
    told = summary(spans(LINES))
    assert told["requests"] == [{"request": "build", "count": 2, "failed": 1, "secs": 3.0, "median_secs": 1.5, "longest_secs": 2.0}]
    assert [(each["process"], each["busy"]) for each in told["processes"]] == [("compile 7", 0.2), ("compile 8", 0.1)]
    assert [(each["entry"], each["secs"]) for each in told["entries"]] == [("a@box", 3.0), ("b@box", 3.0)]


def test_a_log_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in LINES[:2]) + '{"event": "ra')
    found = spans(read_log(path))
    assert [(span.name, span.secs) for span in found] == [("build", 1.0), ("a@box", 0.0)]
    assert summary(found)["failure"] == "cut off"


def test_events_are_lines_with_their_fields() -> None:
    file = io.StringIO()
    log = EventLog([file])
    for event in (
        Begun("a@box", "c1"),
        Step("a@box", "built", 1, 2),
        Ran("lower x", "compile 7", 1.0, 0.5),
        Finished("a@box", "tune", "x"),
    ):
        log(event)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line.pop("event") for line in lines] == ["begun", "step", "ran", "finished"]
    assert all(line.pop("at") > 1e9 for line in lines)
    assert lines[1] == {"entry": "a@box", "doing": "built", "done": 1, "total": 2}
    assert lines[2] == {"request": "lower x", "process": "compile 7", "began": 1.0, "secs": 0.5, "computation": "", "failure": ""}
