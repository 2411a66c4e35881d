"""Owns the order in which tilings on wgmma are tried, where their model alone does not tell which comes first.

Knows nothing of how tilings come about or of what they are expected to take.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from kerneldecl.model import Proposal, Value

FORM = ("block_m", "block_n", "consumers", "kernel_schedule", "split_k", "swap_ab", "stream_k")
SPREAD = 0.02
"""How much less is expected of a tiling for each one before it that differs in stages, clusters or raster alone: so far the model errs."""
DOUBT = 1.08
"""How much behind the best of all the best of a schedule may be and still be among the first."""


def spread(schedules: Iterable[Iterator[Proposal]]) -> Iterator[Proposal]:
    """Yield proposals, given those of each schedule, the quickest first, so that the first few are of several forms.

    Each comes `SPREAD` later for each before it of its own form. What is best of each schedule comes first, unless `DOUBT` says
    that it is behind: which of them wins depends on the clock, too.
    """
    begun = [(best, rest) for rest in schedules if (best := next(rest, None))]
    bests = sorted((best for best, _ in begun), key=_by_time)
    leaders = [best for best in bests if best.predicted_secs <= DOUBT * bests[0].predicted_secs]
    yield from leaders
    seen: Counter[tuple[Value, ...]] = Counter()
    expected: list[tuple[float, int, Proposal]] = []
    for at, proposal in enumerate(heapq.merge(*(itertools.chain((best,), rest) for best, rest in begun), key=_by_time)):
        while expected and expected[0][0] <= proposal.predicted_secs:
            yield heapq.heappop(expected)[-1]
        form = tuple(value for name, value in proposal.candidate.params if name in FORM)
        if proposal not in leaders:
            heapq.heappush(expected, (proposal.predicted_secs * (1 + SPREAD * seen[form]), at, proposal))
        seen[form] += 1
    while expected:
        yield heapq.heappop(expected)[-1]


def _by_time(proposal: Proposal) -> tuple[float, tuple[tuple[str, Value], ...]]:
    return proposal.predicted_secs, proposal.candidate.params
