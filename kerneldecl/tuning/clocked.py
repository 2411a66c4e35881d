"""Owns the clock of a search: the seconds in which its candidates were compiled, measured and thought of.

Knows nothing of answers, or of what a search does with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kerneldecl.runners.process import Answer, Answers
from kerneldecl.tuning.task import Runner

_ASKING = frozenset({"ask", "propose", "propose_next"})


class Clocked:
    """Passes requests on to a runner, and adds up how long each kind took. What a GPU measures while compilers run counts as both."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.compile_secs = 0.0
        """Seconds in which candidates were built, however many side by side."""
        self.measure_secs = 0.0
        """Seconds in which inputs and reference were made, and candidates verified and timed."""
        self.ask_secs = 0.0
        """Seconds in which a policy was asked."""
        self._noting = threading.Lock()  # inputs are made in another thread

    def start(self, count: int) -> None:
        self._runner.start(count)

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Answers:
        begun = time.perf_counter()
        yield from self._runner.run_all(requests, limit_secs, priority)
        self.compile_secs += time.perf_counter() - begun

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        begun = time.perf_counter()
        answer = self._runner.measure(request, limit_secs)
        took = time.perf_counter() - begun
        with self._noting:
            if request["action"] in _ASKING:
                self.ask_secs += took
            else:
                self.measure_secs += took
        return answer

    def side_by_side(self, _model: str, _most: int) -> Sequence[Runner]:
        """Return itself: a search that is clocked has one device."""
        return (self,)
