"""Owns the sampling of calls on a GPU in two protocols: steady, back to back; isolated, each behind a small kernel of somebody else.

Knows nothing of operators. Both are CUDA graphs over arguments that rotate beyond the L2, as in `timing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench_support import table
from bench_support.gpu.timing import Behind, Call, Replay, interleaved, neighbours

STEADY, ISOLATED = "steady", "isolated"


def sampled(calls: Mapping[str, Call], copies: int, flush: Callable[[], object], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds a call by protocol and contender, a sample for each round. All take turns, so that one clock meets them all."""
    foreign = neighbours()[ISOLATED]
    steady = interleaved({name: Replay(call, copies, flush) for name, call in calls.items()}, rounds)
    behind = {name: Behind(call, foreign, (copies, flush)) for name, call in calls.items()}
    return {STEADY: steady, ISOLATED: table.interleaved({name: each.secs for name, each in behind.items()}, rounds)}
