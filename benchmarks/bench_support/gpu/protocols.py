"""Owns the two protocols in which calls on a GPU are timed: steady, back to back; isolated, each behind a small kernel of somebody else.

Knows nothing of operators. Both are CUDA graphs over arguments that rotate beyond the L2, as in `timing`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from bench_support.gpu.timing import Call, Replay, interleaved, median

STEADY, ISOLATED = "steady", "isolated"
FOREIGN_ELEMENTS = 1024
"""Elements of the addition between two launches: 4 KB of float32."""
FOREIGN_REPLAYS = 9


def sampled(calls: Mapping[str, Call], copies: int, flush: Callable[[], object], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds a call by protocol and contender, a sample for each round. All take turns, so that one clock meets them all.

    Isolated calls have an addition of torch before each; the time that it takes by itself, back to back, is taken away.
    """
    replays: dict[str, Replay] = {}
    for name, call in calls.items():
        replays[f"{STEADY} {name}"] = Replay(call, copies, flush)
        replays[f"{ISOLATED} {name}"] = Replay(_behind_foreign(call), copies, flush)
    samples = interleaved(replays, rounds)
    alone = Replay(_foreign(), 1, flush)
    foreign_secs = median([alone.secs() for _ in range(FOREIGN_REPLAYS)])
    return {
        STEADY: {name: samples[f"{STEADY} {name}"] for name in calls},
        ISOLATED: {name: [secs - foreign_secs for secs in samples[f"{ISOLATED} {name}"]] for name in calls},
    }


def _behind_foreign(call: Call) -> Call:
    before = _foreign()

    def both(index: int) -> Any:
        before(index)
        return call(index)

    return both


def _foreign() -> Call:
    x = torch.zeros(FOREIGN_ELEMENTS, device="cuda")
    return lambda _: x.add_(1.0)
