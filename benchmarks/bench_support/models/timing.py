"""Owns the timing of whole models: as a program calls them, and on a GPU inside CUDA graphs too; contenders take turns.

Knows nothing of what a contender is. Needs torch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from bench_support.own_process import first_line
from bench_support.table import interleaved

Call = Callable[[int], Any]
Samples = dict[str, list[float]]
CPU_SAMPLE_SECS = 0.2
"""Shortest sample on a CPU."""
REST_SECS = 0.05
"""Seconds before a sample on a CPU: threads of the contender before, which spin while they wait for work, sleep by then."""
CALLS = 20
"""Most calls in a sample on a GPU without a CUDA graph."""
GPU_SAMPLE_SECS = 0.02
"""Approximate seconds of such a sample: slow contenders are called fewer times."""


def timed(calls: Mapping[str, Call], sets: int, l2_bytes: int, rounds: int) -> tuple[Samples, dict[str, str]]:
    """Return each contender's seconds a call, and why it has none; on a GPU (`l2_bytes` are not 0) also "NAME, graph".

    `sets` is how many arguments a call can have: calls rotate over them.
    """
    if not l2_bytes:
        return interleaved({name: _CpuCalls(call, sets).secs for name, call in calls.items()}, rounds), {}
    from bench_support.gpu.timing import Replay, flusher
    from bench_support.gpu.timing import interleaved as replayed

    flush, failures, replays = flusher(l2_bytes), dict[str, str](), dict[str, Replay]()
    for name, call in calls.items():
        try:
            replays[f"{name}, graph"] = Replay(call, sets, flush)
        except Exception as error:  # noqa: BLE001  what cannot be captured is timed without a graph
            failures[f"{name}, graph"] = first_line(error)
    launches = interleaved({name: _GpuCalls(call, sets, flush).secs for name, call in calls.items()}, min(rounds, 5))
    return (replayed(replays, rounds) if replays else {}) | launches, failures


class _CpuCalls:
    """Calls one after the other."""

    def __init__(self, call: Call, sets: int) -> None:
        self._call, self._sets, self._calls = call, sets, 1
        self.secs()
        self._calls = max(1, round(CPU_SAMPLE_SECS / self.secs()))

    def secs(self) -> float:
        time.sleep(REST_SECS)
        self._call(0)
        start = time.perf_counter()
        for index in range(self._calls):
            self._call(index % self._sets)
        return (time.perf_counter() - start) / self._calls


class _GpuCalls:
    """Calls one after the other without a graph: their time includes that of the launches."""

    def __init__(self, call: Call, sets: int, flush: Callable[[], object]) -> None:
        self._call, self._sets, self._flush, self._calls = call, sets, flush, 1
        for index in range(2):
            call(index % sets)
        self._calls = max(1, min(CALLS, math.ceil(GPU_SAMPLE_SECS / self.secs())))

    def secs(self) -> float:
        self._flush()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for index in range(self._calls):
            self._call(index % self._sets)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / self._calls
