"""Owns measuring on one of several GPUs at the same time: requests go to its own process, and its loss is noticed.

Knows nothing of how GPUs are chosen or locked, of the other GPUs, or of what becomes of what a lost one was measuring.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kerneldecl.errors import LostGpuError
from kerneldecl.hardware.cuda_driver import DriverGpu
from kerneldecl.runners.process import INTERRUPTED, Answer, Answers, Worker

Request = Mapping[str, Any]
ANSWER_SECS = 30.0
"""Time within which a GPU answers, from the start of its process on."""
TRIES = 2
"""A process may still be dying when it is asked first."""


@dataclass(frozen=True)
class Measurer:
    """A worker that measures, one request at a time."""

    worker: Worker
    lock: threading.Lock = field(default_factory=threading.Lock)


class Owner(Protocol):
    """What has the workers."""

    def start(self, count: int) -> None: ...

    def run_all(self, requests: Sequence[Request], limit_secs: float, priority: int = 0) -> Answers: ...

    def measure(self, request: Request, limit_secs: float) -> Answer: ...

    def ask(self, measurer: Measurer, request: Request, limit_secs: float) -> Answer: ...


class OneGpu:
    """A runner that measures on its own GPU; all other requests are its owner's."""

    def __init__(self, owner: Owner, gpu: DriverGpu, measurer: Measurer) -> None:
        self._owner, self._gpu, self.measurer = owner, gpu, measurer

    def start(self, count: int) -> None:
        self._owner.start(count)

    def run_all(self, requests: Sequence[Request], limit_secs: float, priority: int = 0) -> Answers:
        return self._owner.run_all(requests, limit_secs, priority)

    def measure(self, request: Request, limit_secs: float) -> Answer:
        """Return the answer of the GPU's process; raise LostGpuError where the GPU, asked anew, does not answer any more."""
        if (request["device"], request["model"]) != ("cuda", self._gpu.model):
            return self._owner.measure(request, limit_secs)
        answer = self._owner.ask(self.measurer, request, limit_secs)
        # A verdict on results tells that the GPU works.
        if "failure" in answer and "error" not in answer and answer["failure"] != INTERRUPTED:
            self._check()
        return answer

    def side_by_side(self, model: str, most: int) -> Sequence[OneGpu]:
        del model, most
        return (self,)

    def _check(self) -> None:
        request = {"action": "is_there", "device": "cuda", "model": self._gpu.model}
        failure = ""
        for _ in range(TRIES):
            failure = self._owner.ask(self.measurer, request, ANSWER_SECS).get("failure", "")
            if failure in {"", INTERRUPTED}:
                return
        raise LostGpuError(f"{self._gpu.model} {self._gpu.short_uuid} at {self._gpu.pci} no longer answers: {failure}")
