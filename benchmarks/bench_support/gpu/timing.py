"""Owns timing on a GPU: launches inside CUDA graphs over rotated arguments, L2 flushed before each replay.

Knows nothing of operators or of what is compared. Needs torch, imported before TVM: it brings CUDA's runtime library.

A graph holds many launches: the time is that of the kernel and the least gap between two kernels, without Python. Launches
rotate over arguments that exceed twice the L2, so that every launch reads its inputs from DRAM. Contenders are interleaved
replay by replay: a change of clock meets all of them, and ratios are taken within a round. After a rest a GPU runs large
GEMM up to a fifth faster than its power allows for long: rounds that are not counted come first, until times are steady.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from bench_support.table import quantiles

Call = Callable[[int], Any]
"""Runs a contender on the argument set of this index; returns its output in the rule's layout."""

REPLAY_SECS = 4e-3
"""Shortest replay: events resolve half a microsecond, and launching a graph takes some."""
MAX_LAUNCHES = 256
WARM_SECS, STEADY, MOST_WARM = 0.25, 0.01, 8
"""Warm-up: stretches of so many seconds, until one's rounds take as long as those before within this share; most stretches."""
ALONE_SECS = 0.2
"""Seconds of one contender's launches alone, once as warm-up and once counted."""
RESTED_SAMPLES, MOST_REST_SECS = 7, 0.03
"""Of a contender under the protocol `cool`: samples, and longest rest after one (as in kerneldecl/runners/gpu_arguments.py)."""
COMPARISON_SECS = 0.6
"""Seconds of all rounds of a comparison that are counted."""


def copies_of(least_bytes: int, l2_bytes: int) -> int:
    """Return the number of argument sets to rotate over: more than twice the L2, or one for each launch of a graph."""
    return min(MAX_LAUNCHES, 1 + math.ceil(2 * l2_bytes / least_bytes))


class Replay:
    """One contender's launches, captured in a CUDA graph."""

    def __init__(self, call: Call, copies: int, flush: Callable[[], object], launches: int = 0) -> None:
        """Capture as many launches as a replay is to have, or so many; calls rotate over so many copies of their arguments."""
        from kerneldecl import plain_starts

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            once_secs = _warm(call, copies, stream)
            self.launches = launches or max(1, min(MAX_LAUNCHES, math.ceil(REPLAY_SECS / once_secs)))
            self._graph = torch.cuda.CUDAGraph(keep_graph=True)
            # Outputs that a call allocates are freed before the next one: they share the graph's memory.
            with torch.cuda.graph(self._graph, stream=stream):
                for index in range(self.launches):
                    call(index % copies)
        plain_starts(self._graph.raw_cuda_graph())
        self._graph.instantiate()
        self._flush = flush
        self.secs()  # the first replay uploads the graph

    def secs(self) -> float:
        """Return the seconds of one launch in one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush()  # runs while the graph is being launched
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / self.launches


class Behind:
    """One contender's launches, each behind a small kernel whose own time is taken away."""

    def __init__(self, call: Call, neighbour: Callable[[], object], replay: tuple[int, Callable[[], object]]) -> None:
        """`replay` is the number of copies of the arguments, and what flushes the L2 cache."""

        def both(index: int) -> Any:
            neighbour()
            return call(index)

        self._both = Replay(both, *replay)
        self._alone = Replay(lambda _: neighbour(), *replay, launches=self._both.launches)

    def secs(self) -> float:
        """Return the seconds of one launch."""
        return self._both.secs() - self._alone.secs()


def neighbours() -> dict[str, Callable[[], object]]:
    """Return what stands before a kernel, by protocol: an addition of torch of 4 KB, or a copy as kerneldecl launches its kernels."""
    from ctypes import c_void_p

    from kerneldecl.runners.neighbours import neighbours as on_gpu

    x, y = torch.ones(1024, device="cuda"), torch.empty(1024, device="cuda")
    own = on_gpu()
    return {
        "isolated": lambda: torch.add(x, x, out=y),
        "chained": lambda: own.own(c_void_p(torch.cuda.current_stream().cuda_stream)),
    }


def rested(replay: Replay) -> float:
    """Return a contender's seconds a launch where the GPU rests before each replay as long as it took."""
    samples = []
    for _ in range(RESTED_SAMPLES):
        samples.append(replay.secs())
        time.sleep(min(MOST_REST_SECS, samples[-1] * replay.launches))
    return median(samples)


def _warm(call: Call, copies: int, stream: Any) -> float:
    """Run a contender until its libraries have chosen a kernel, and return the approximate seconds of a call."""
    for index in range(min(2, copies)):
        call(index)
    stream.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record(stream)
    call(0)
    end.record(stream)
    end.synchronize()
    return max(1e-6, float(begin.elapsed_time(end)) * 1e-3)


def flusher(l2_bytes: int) -> Callable[[], object]:
    """Return a function that overwrites the L2 cache."""
    return torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda").zero_


def interleaved(replays: Mapping[str, Replay], rounds: int) -> dict[str, list[float]]:
    """Return each contender's seconds a launch, one for each round; fewer rounds where replays are long, never fewer than 3.

    Without a contender there is nothing to time: rounds of nothing would take no time, and never warm the GPU up.
    Every other round runs in reverse order: no contender always follows the same one, which may have heated the GPU up.
    """
    if not replays:
        return {}
    round_secs = math.inf
    for _ in range(MOST_WARM):
        before, rounds_secs = round_secs, list[float]()
        while sum(rounds_secs) < WARM_SECS:
            rounds_secs.append(sum(replay.secs() * replay.launches for replay in replays.values()))
        round_secs = median(rounds_secs)
        if abs(round_secs / before - 1) < STEADY:
            break
    count = max(3, min(rounds, int(COMPARISON_SECS / round_secs)))
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for number in range(count):
        for name in list(replays)[:: -1 if number % 2 else 1]:
            samples[name].append(replays[name].secs())
    return samples


def alone(replay: Replay) -> float:
    """Return a contender's seconds a launch where it runs by itself, after a warm-up.

    Interleaved contenders share a clock that power may limit; here the clock is the one that the contender's own power allows.
    """
    for _ in range(2):
        samples, begin = [], time.perf_counter()
        while time.perf_counter() - begin < ALONE_SECS:
            samples.append(replay.secs())
    return median(samples)


def median(samples: Sequence[float]) -> float:
    return quantiles(samples)[1]


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return the median over the rounds of their time by ours: over 1, ours is faster."""
    return median([their_secs / our_secs for their_secs, our_secs in zip(theirs, ours, strict=True)])
