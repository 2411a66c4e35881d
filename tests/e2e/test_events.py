"""Owns the tests of a real build's events: a file that is followed, the last build's log, its trace, and its spans sent elsewhere.

Knows nothing of how events come about.
"""

from __future__ import annotations

import http.server
import json
import threading

import pytest
from support.spaces import REAL, Space


def test_a_build_leaves_its_events_and_a_trace(space: Space) -> None:
    space.write(REAL)
    followed, trace = space.root / "followed.jsonl", space.root / "trace.json"
    assert "no build has run here" in space.run_here("log", "last", code=10).stderr
    space.run("build", "--events", str(followed))
    lines = [json.loads(line) for line in followed.read_text().splitlines()]
    assert (space.root / "cache" / "events.jsonl").read_text() == followed.read_text()
    assert (lines[0]["event"], lines[0]["schema"], lines[-1]["event"], lines[-1]["failure"]) == ("log", 1, "ended", "")
    tuned = {line["entry"] for line in lines if line["event"] == "finished" and line["kind"] == "tune"}
    ran = [line for line in lines if line["event"] == "ran"]
    assert {line["request"].split()[0] for line in ran} >= {"lower", "propose", "build", "prepare", "verify", "sample", "confirm"}
    assert {line["process"].rsplit(" ", 1)[0] for line in ran} == {"compile", "policy", "measure cpu"}

    told = space.run_json_here("log", "last", "--trace", str(trace))
    assert {each["entry"] for each in told["entries"]} == tuned
    assert sum(each["count"] for each in told["requests"]) == len(ran)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 1 + len(tuned) + len(ran)
    whole = next(event for event in events if event["name"] == "build")
    assert all(event["ts"] >= -1e3 and event["ts"] + event["dur"] <= whole["dur"] + 1e3 for event in events), "nothing outside of the build"

    space.run("build")
    assert space.run_json_here("log", "last")["requests"] == told["requests"], "a build with nothing to do leaves the log of the one before"


@pytest.mark.slow
def test_spans_go_to_an_endpoint_of_opentelemetry(space: Space) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra otel is not installed")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        space.write(REAL).run("build", "relu", OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    sent = [ExportTraceServiceRequest.FromString(body) for body in got]
    found = [span for each in sent for resource in each.resource_spans for scope in resource.scope_spans for span in scope.spans]
    by_name = {span.name: span for span in found}
    (root,) = [span for span in found if not span.parent_span_id]
    assert root.name == "build"
    assert by_name["relu@host"].parent_span_id == root.span_id
    told = space.run_json("log", "last")
    assert len(found) == 1 + len(told["entries"]) + sum(each["count"] for each in told["requests"])
