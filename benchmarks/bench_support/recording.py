"""Owns a runner that notes when each worker process was busy, and with what.

Knows nothing of what the requests are for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kerneldecl.runners.local import LocalRunner
from kerneldecl.runners.process import Answer, Worker


class Span(NamedTuple):
    """One request to one process."""

    worker: int
    """A number for each process."""
    kind: str
    """"compile", "policy", or the device that measures."""
    action: str
    """What was asked; of a sample the protocol as well."""
    begin: float
    end: float

    @property
    def secs(self) -> float:
        return self.end - self.begin


class RecordingRunner(LocalRunner):
    """A `LocalRunner` that keeps a span of each request."""

    def __init__(self, *given: Any, nice: int = 0, **named: Any) -> None:
        """`nice` is added to the niceness of the processes that compile."""
        super().__init__(*given, **named)
        self._nice = nice
        self.spans: list[Span] = []
        self._numbers: dict[int, int] = {}
        self._noting = threading.Lock()

    def _answer(self, worker: Worker, request: Mapping[str, Any], limit_secs: float) -> Answer:
        if self._nice and "device" not in request:
            worker.start()
            if process := worker._process:  # noqa: SLF001  what a compiler starts is as nice as its worker
                os.setpriority(os.PRIO_PROCESS, process.pid, self._nice)
        begin = time.perf_counter()
        try:
            return super()._answer(worker, request, limit_secs)
        finally:
            protocol = f" {request['protocol']}" if "protocol" in request else ""
            with self._noting:
                number = self._numbers.setdefault(id(worker), len(self._numbers))
                kind, action = str(request.get("device", "compile")), f"{request['action']}{protocol}"
                self.spans.append(Span(number, kind, action, begin, time.perf_counter()))


def busy_secs(spans: Iterable[Span], begin: float, end: float) -> float:
    """Return the seconds within an interval that the spans take together."""
    return sum(max(0.0, min(span.end, end) - max(span.begin, begin)) for span in spans)


def gaps(spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds for which one process waited, by the action that it waited for."""
    found: dict[str, float] = {}
    last: float | None = None
    for span in sorted(spans, key=lambda span: span.begin):
        if last is not None and span.begin > last:
            found[span.action] = found.get(span.action, 0.0) + span.begin - last
        last = max(span.end, last or 0.0)
    return found
