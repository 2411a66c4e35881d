"""Owns the order in which tilings on wgmma are tried, where their model alone does not tell which comes first.

Knows nothing of how tilings come about or of what they are expected to take.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from kerneldecl.model import Proposal, Value

FORM = ("block_m", "block_n", "consumers", "schedule", "split", "swap", "stream")
SPREAD = 0.02
"""How much less is expected of a tiling for each one before it that differs in stages, clusters or raster alone: so far the model errs."""
DOUBT = 1.08
"""How much behind the best of all the best of a schedule may be and still be among the first."""


def spread(proposals: Iterable[Proposal]) -> Iterator[Proposal]:
    """Yield proposals, given the quickest first, in another order, so that the first few are of several forms.

    Each comes `SPREAD` later for each before it of its own form. What is best of each schedule comes first, unless `DOUBT` says
    that it is behind: which of them wins depends on the clock, too.
    """
    coming = iter(proposals)
    first: list[Proposal] = []
    leaders: dict[tuple[Value, bool], Proposal] = {}
    for proposal in coming:
        first.append(proposal)
        if proposal.predicted_secs > DOUBT * first[0].predicted_secs:
            break
        leaders.setdefault(_schedule(proposal), proposal)
    yield from leaders.values()
    seen: Counter[tuple[Value, ...]] = Counter()
    expected: list[tuple[float, int, Proposal]] = []
    for at, proposal in enumerate(itertools.chain(first, coming)):
        while expected and expected[0][0] <= proposal.predicted_secs:
            yield heapq.heappop(expected)[-1]
        form = tuple(value for name, value in proposal.candidate.params if name in FORM)
        if proposal is not leaders.get(_schedule(proposal)):
            heapq.heappush(expected, (proposal.predicted_secs * (1 + SPREAD * seen[form]), at, proposal))
        seen[form] += 1
    while expected:
        yield heapq.heappop(expected)[-1]


def _schedule(proposal: Proposal) -> tuple[Value, bool]:
    params = dict(proposal.candidate.params)
    return params["schedule"], params["stream"] != 0
