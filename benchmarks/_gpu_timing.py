"""Owns timing on a GPU: launches inside CUDA graphs over rotated arguments, the second-level cache flushed before each replay.

Knows nothing of operators or of who contends. Needs torch, imported before TVM: it brings CUDA's runtime library.

A graph holds many launches, so that what is timed is the kernel and the least gap between two kernels, not Python. Its
arguments change from launch to launch until twice the second-level cache is used, so that every launch finds its inputs
in DRAM. Contenders take turns replay by replay: a change of clock meets all of them, and ratios are taken within a turn.
A GPU that has rested runs large products faster than its power allows for long, by up to a fifth: turns that are not counted
come first, until it works as steadily as it does for users.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from _table import quantiles

Call = Callable[[int], Any]
"""Runs a contender on the arguments of the given number; returns its output in the layout of the rule."""

REPLAY_SECS = 4e-3
"""Of one replay at least: events resolve half a microsecond, and the launch of a graph costs some."""
MAX_LAUNCHES = 256
WARM_SECS, STEADY, MOST_WARM = 0.25, 0.01, 8
"""Of turns that are not counted: until such a stretch takes as long as the one before it, or at most so many of them."""
ALONE_SECS = 0.2
"""Of one contender's launches alone that are not counted, and of those that are."""
CONTEST_SECS = 0.6
"""For all rounds of one contest that are counted."""


def copies_of(least_bytes: int, l2_bytes: int) -> int:
    """Return how many sets of arguments to rotate over: more than twice the cache, or one for each launch of a graph."""
    return min(MAX_LAUNCHES, 1 + math.ceil(2 * l2_bytes / least_bytes))


class Replay:
    """One contender's launches, captured."""

    def __init__(self, call: Call, copies: int, flush: Callable[[], object]) -> None:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            once_secs = _warm(call, copies, stream)
            self.launches = max(1, min(MAX_LAUNCHES, math.ceil(REPLAY_SECS / once_secs)))
            self._graph = torch.cuda.CUDAGraph()
            # Outputs that a call allocates are freed before the next one: they share the graph's memory.
            with torch.cuda.graph(self._graph, stream=stream):
                for index in range(self.launches):
                    call(index % copies)
        self._flush = flush
        self.secs()  # the first replay uploads the graph

    def secs(self) -> float:
        """Return the seconds of one launch in one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush()  # runs while the graph is on its way
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3 / self.launches


def _warm(call: Call, copies: int, stream: Any) -> float:
    """Run a contender until its libraries have chosen what to run, and return the seconds of a call, roughly."""
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
    """Return what overwrites the second-level cache."""
    return torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda").zero_


def contest(replays: Mapping[str, Replay], rounds: int) -> dict[str, list[float]]:
    """Return each contender's seconds a launch, one for each round; fewer rounds where replays are long, never fewer than 3.

    Every other round goes backwards: nobody always follows the same one, which may have heated the GPU up.
    """
    round_secs = math.inf
    for _ in range(MOST_WARM):
        before, rounds_secs = round_secs, list[float]()
        while sum(rounds_secs) < WARM_SECS:
            rounds_secs.append(sum(replay.secs() * replay.launches for replay in replays.values()))
        round_secs = median(rounds_secs)
        if abs(round_secs / before - 1) < STEADY:
            break
    count = max(3, min(rounds, int(CONTEST_SECS / round_secs)))
    samples: dict[str, list[float]] = {name: [] for name in replays}
    for number in range(count):
        for name in list(replays)[:: -1 if number % 2 else 1]:
            samples[name].append(replays[name].secs())
    return samples


def alone(replay: Replay) -> float:
    """Return a contender's seconds a launch where nobody else runs, once it has been at it for a while.

    In a contest clocks that power holds down are the same for all; here they are what the contender's own power allows.
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
