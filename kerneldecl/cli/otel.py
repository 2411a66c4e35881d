"""Owns the export of a build's spans to OpenTelemetry, where its own variable names an endpoint.

Knows nothing of builds. The library comes with the extra `otel`; without it, or where the endpoint fails, the build reports it and goes on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from kerneldecl.report.spans import BUILD, ENTRIES, Span

VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NANO = 1_000_000_000


def is_wanted(environment: Mapping[str, str] = os.environ) -> bool:
    return any(environment.get(name) for name in VARIABLES) and environment.get("OTEL_SDK_DISABLED", "").lower() != "true"


def export(found: Sequence[Span]) -> str:
    """Send spans by OTLP over HTTP, as the library's variables say; return why that failed, as a sentence."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    except ImportError as error:
        named = next(name for name in VARIABLES if os.environ.get(name))
        return f"{named} is set, but {error.name} is not installed: `pip install 'kerneldecl[otel]'`, or unset it"

    kept, provider = InMemorySpanExporter(), TracerProvider()  # all go out at once
    provider.add_span_processor(SimpleSpanProcessor(kept))
    _record(provider.get_tracer("kerneldecl"), found)
    sender = OTLPSpanExporter()
    sent = sender.export(kept.get_finished_spans())
    sender.shutdown()
    provider.shutdown()
    return "" if sent is SpanExportResult.SUCCESS else "the OpenTelemetry endpoint did not take the build's spans"


def _record(tracer: Any, found: Sequence[Span]) -> None:
    """Record spans: the build above all, requests below the first entry that they were for."""
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    above: dict[str, Any] = {}
    for span in found:
        parent = above.get(next(iter(span.fields.get("entries", ())), ""), above.get(BUILD))
        context = set_span_in_context(parent) if parent else None
        attributes = {f"kerneldecl.{name}": value for name, value in span.fields.items()} | {"kerneldecl.track": span.track}
        recorded = tracer.start_span(span.name, context=context, start_time=round(span.began * _NANO), attributes=attributes)
        if span.fields.get("failure"):
            recorded.set_status(Status(StatusCode.ERROR, str(span.fields["failure"])))
        if span.track in {BUILD, ENTRIES}:
            above[span.name] = recorded
        recorded.end(end_time=round((span.began + span.secs) * _NANO))
