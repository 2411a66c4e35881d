"""Owns the two protocols in which calls on a CPU are timed: steady, back to back; isolated, each behind a small call of somebody else.

Knows nothing of operators. Arguments stay the same: programs find them in caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from bench_support.table import interleaved, quantiles
from host import settle, warm_up

Call = Callable[[], object]
SAMPLE_SECS = 5e-3
"""Approximate seconds of a sample."""
FOREIGN_ELEMENTS = 1024


def sampled(calls: Mapping[str, Call], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds a call by protocol and contender, a sample for each round; contenders take turns."""
    x = torch.zeros(FOREIGN_ELEMENTS)

    def foreign() -> object:
        return x.add_(1.0)

    foreign_secs = quantiles([_secs((foreign,), 64) for _ in range(9)])[1]
    samplers: dict[str, Callable[[], float]] = {}
    for name, call in calls.items():
        call()
        count = max(1, round(SAMPLE_SECS / _secs((call,), 1)))
        samplers[f"steady {name}"] = lambda call=call, count=count: _settled((call,), count)  # type: ignore[misc]
        samplers[f"isolated {name}"] = lambda call=call, count=count: _settled((foreign, call), count) - foreign_secs  # type: ignore[misc]
    samples = interleaved(samplers, rounds)
    return {protocol: {name: samples[f"{protocol} {name}"] for name in calls} for protocol in ("steady", "isolated")}


def _settled(calls: tuple[Call, ...], count: int) -> float:
    """Return the seconds of one turn once the other contender's threads sleep and our own are where they stay."""
    settle()
    warm_up(lambda: _secs(calls, 1))
    return _secs(calls, count)


def _secs(calls: tuple[Call, ...], count: int) -> float:
    """Return the seconds of one turn of the calls, of `count` turns."""
    start = time.perf_counter()
    for _ in range(count):
        for call in calls:
            call()
    return (time.perf_counter() - start) / count
