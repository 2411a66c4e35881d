"""Owns the runner of boards behind TVM's RPC: what is measured for declared archs goes there, all else stays on this machine.

Knows nothing of Dask, or of how a board is talked to: a worker process does that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.can_measure import why_not_measured_here
from kerneldecl.model import Arch, Trial
from kerneldecl.runners.process import Answer, Answers
from kerneldecl.store.protocol import Store
from kerneldecl.tuning.batch import measured
from kerneldecl.tuning.task import PREPARE_SECS, Batches, Doing, Runner, Task


def board_of(address: str) -> dict[str, str]:
    """Return the tracker and the key that HOST:PORT/KEY names; raise ToolchainError for anything else."""
    tracker, _, key = address.partition("/")
    host, _, port = tracker.rpartition(":")
    if not (host and port.isdecimal() and key):
        raise ToolchainError(f"--rpc {address} is not HOST:PORT/KEY, of a tracker and of the key that its servers have")
    return {"tracker": tracker, "key": key}


class BoardRunner:
    """Runs requests here, and measures for declared archs on a board."""

    def __init__(self, address: str, here: Runner, store: Store) -> None:
        self._board, self._here, self._store = board_of(address), here, store
        self._devices: dict[str, dict[str, Any]] = {}
        """By task folder, what is known of the device that has measured it last."""
        self._reasons: dict[Arch, str] = {}
        self._measuring = threading.Lock()

    def start(self, count: int) -> None:
        self._here.start(count)

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Answers:
        return self._here.run_all(requests, limit_secs, priority)

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        return self._here.measure(request, limit_secs)

    def side_by_side(self, model: str, most: int) -> Sequence[Runner]:
        """Return two: what the next entry needs is compiled while the board, which is one, measures."""
        del model
        return [self] * min(most, 2)

    @property
    def batches(self) -> Batches:
        return self

    def why_not(self, arch: Arch) -> str:
        """Return why nothing can be measured for an arch; empty where the tracker gives a board, or for this machine's own."""
        if arch not in self._reasons:
            is_here = arch.is_detected
            answer = {} if is_here else _There(self._board, self._here).measure({"action": "is_there", "device": arch.kind}, PREPARE_SECS)
            self._reasons[arch] = why_not_measured_here(arch) if is_here else str(answer.get("failure", ""))
        return self._reasons[arch]

    def is_here(self, arch: Arch) -> bool:
        return arch.is_detected

    def measured(self, doing: Doing, task: Task, trials: Sequence[Trial]) -> list[Trial]:
        """Return a batch after the board, or this machine, has measured it."""
        runner = self._here if task.arch.is_detected else _There(self._board, self._here)
        with self._measuring:
            found = measured(doing, task, trials, runner, self._store)
        self._devices[str(task.folder)] = found.device
        return list(found.trials)

    def measured_on(self, task: Task) -> dict[str, Any]:
        return self._devices.get(str(task.folder), {})


class _There:
    """Passes requests to measure on to the process that talks to the board."""

    def __init__(self, board: Mapping[str, str], here: Runner) -> None:
        self._board, self._here = board, here

    def start(self, count: int) -> None:
        self._here.start(count)

    def run_all(self, requests: Sequence[Mapping[str, Any]], limit_secs: float, priority: int = 0) -> Answers:
        return self._here.run_all(requests, limit_secs, priority)

    def measure(self, request: Mapping[str, Any], limit_secs: float) -> Answer:
        board = {**self._board, "kind": request["device"]}
        named = {"spec": {**request["spec"], "board": board}} if "spec" in request else {"board": board}
        return self._here.measure({**request, "device": "rpc", "model": "", **named}, limit_secs)

    def side_by_side(self, model: str, most: int) -> Sequence[Runner]:
        del model, most
        return (self,)
