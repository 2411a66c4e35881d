"""Owns the count of what a runner was asked in a build: what was scheduled, verified and measured, whatever was planned.

Knows nothing of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kerneldecl.model import Arch, Trial
from kerneldecl.runners.process import Answer, Answers
from kerneldecl.tuning.task import Batches, Doing, Runner, Task, batches_of

_COUNTED = {"build": "scheduled", "verify": "verified", "sample": "measured"}
"""What is counted, by the action of a request. A candidate is sampled many times, and is one that was measured."""


class Counted:
    """Passes requests on to a runner, and keeps count."""

    def __init__(self, runner: Runner, asked: list[tuple[str, str]] | None = None) -> None:
        """`asked` is what another has counted so far, and counts on."""
        self._runner = runner
        self._asked: list[tuple[str, str]] = [] if asked is None else asked  # appended to by several threads

    @property
    def counts(self) -> dict[str, int]:
        """Return how many candidates were scheduled (and compiled, where the schedule was new), verified and measured."""
        measured = len({library for action, library in self._asked if action == "sample"})
        asked = [action for action, _ in self._asked]
        return {name: measured if action == "sample" else asked.count(action) for action, name in _COUNTED.items()}

    def start(self, count: int) -> None:
        self._runner.start(count)

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Answers:
        for request in requests:
            self._note(request)
        return self._runner.run_all(requests, limit_secs, priority)

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        self._note(request)
        return self._runner.measure(request, limit_secs)

    @property
    def batches(self) -> Batches | None:
        """What measures elsewhere; it is asked through this, which counts."""
        return self if batches_of(self._runner) else None

    def why_not(self, arch: Arch) -> str:
        return self._elsewhere.why_not(arch)

    def is_here(self, arch: Arch) -> bool:
        return self._elsewhere.is_here(arch)

    def measured(self, doing: Doing, task: Task, trials: Sequence[Trial]) -> list[Trial]:
        for trial in trials:
            self._asked += [("verify", trial.code_digest)] * (doing != "final")
        found = self._elsewhere.measured(doing, task, trials)
        self._asked += [("sample", str(task.library_path(trial.code_digest))) for trial in found if trial.samples and doing != "verify"]
        return found

    def measured_on(self, task: Task) -> dict[str, Any]:
        return self._elsewhere.measured_on(task)

    @property
    def _elsewhere(self) -> Batches:
        found = batches_of(self._runner)
        assert found is not None, "nobody asks a runner for batches that measures itself"
        return found

    def side_by_side(self, model: str, most: int) -> Sequence[Runner]:
        return [Counted(runner, self._asked) for runner in self._runner.side_by_side(model, most)]

    def _note(self, request: Mapping[str, Any]) -> None:
        self._asked.append((request["action"], str(request.get("library", ""))))
