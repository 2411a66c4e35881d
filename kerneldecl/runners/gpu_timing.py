"""Owns how a sample of a kernel is taken on a GPU under each protocol of `kerneldecl.timing`.

Knows nothing of requests, of how many samples are wanted or of what wins.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping

from kerneldecl.runners.cuda_device import Graph
from kerneldecl.runners.gpu_arguments import Loaded, OnGpu
from kerneldecl.runners.memory_layout import most_calls
from kerneldecl.runners.neighbours import BEFORE
from kerneldecl.timing import Protocol

IDLE_SECS = 0.05
"""Time without a launch after which the GPU is warmed up again."""
BURST_SECS, HOT_BURST_SECS = 0.02, 0.005
"""Time of the replays, back to back, of which the last is a steady sample; of a sample that follows one of the same kernel at once."""
HEAT_SECS, MOST_HEAT_SECS, IS_STEADY = 0.05, 0.5, 0.005
"""Time of the replays of which first and last tell the clock; most of it altogether; difference of two such times that is none."""
LEAST_SECS = 1e-9
"""Time of a kernel that takes less than its neighbour's time varies by: behind one that lets it start early, all of it may be hidden."""
_LAST: dict[tuple[str, str], float] = {}
"""When the kernel that was launched last, by the path of its library and its symbol, had done its last steady sample."""


def sample_secs(on_gpu: OnGpu, kernel: Loaded, calls: int, protocol: Protocol) -> float:
    """Return the seconds of a call: the mean of up to `calls` launches in one graph, each on arguments that are not in L2."""
    count = min(calls, most_calls(len(on_gpu.sets()), on_gpu.touched_bytes, on_gpu.gpu.l2_bytes))
    if protocol != "steady":
        _LAST.clear()
    return _SAMPLERS[protocol](on_gpu, kernel, count)


def _cool(on_gpu: OnGpu, kernel: Loaded, count: int) -> float:
    return on_gpu.secs(on_gpu.graph(kernel, count)) / count


def _steady(on_gpu: OnGpu, kernel: Loaded, count: int) -> float:
    """Take the last of replays without rests. Where another kernel or none ran before, the GPU takes on the kernel's own clock first."""
    graph = on_gpu.graph(kernel, count)
    is_hot = time.monotonic() - _LAST.get(kernel.name, -math.inf) < IDLE_SECS
    if not is_hot:
        _heat(on_gpu, graph)
    _, secs = _burst(on_gpu, graph, HOT_BURST_SECS if is_hot else BURST_SECS)
    _LAST.clear()
    _LAST[kernel.name] = time.monotonic()
    return secs / count


def _heat(on_gpu: OnGpu, graph: Graph) -> None:
    """Replay a graph until two replays as far apart as `HEAT_SECS` take as long: the first two already where no power limits the clock."""
    end, before = time.monotonic() + MOST_HEAT_SECS, math.inf
    while time.monotonic() < end:
        first, last = _burst(on_gpu, graph, HEAT_SECS, least=1)
        if any(abs(last / earlier - 1) < IS_STEADY for earlier in (first, before)):
            return
        before = last


def _burst(on_gpu: OnGpu, graph: Graph, secs: float, least: int = 0) -> tuple[float, float]:
    """Replay a graph for about so long, `least` times after the first; return the seconds of the first and of the last replay."""
    flush = on_gpu.flush if on_gpu.reuses_l2 else lambda: None
    flush()
    once = graph.run()
    for _ in range(max(least, int(secs / once))):
        flush()
        graph.start()
    return once, graph.finished()


def _behind(neighbour: Callable[[], None], on_gpu: OnGpu, kernel: Loaded, count: int) -> float:
    """Take the time of a graph in which the neighbour runs before each launch, without that of a graph of the neighbour alone."""
    both = on_gpu.graph(kernel, count, before=neighbour)
    alone = on_gpu.graph(None, count, before=neighbour)
    return max(LEAST_SECS, (on_gpu.secs(both) - on_gpu.secs(alone)) / count)


_SAMPLERS: Mapping[Protocol, Callable[[OnGpu, Loaded, int], float]] = {
    "cool": _cool,
    "steady": _steady,
    "isolated": functools.partial(_behind, BEFORE["isolated"]),
    "chained": functools.partial(_behind, BEFORE["chained"]),
}
