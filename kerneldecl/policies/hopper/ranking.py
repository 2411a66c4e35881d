"""Owns the order in which tilings on wgmma are tried, where the time model alone does not tell which comes first.

Knows nothing of how tilings come about or of what times they are predicted.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from kerneldecl.model import Proposal, Value

KIND_PARAMS = ("block_m", "block_n", "consumers", "kernel_schedule", "split_k", "swap_ab", "stream_k", "workspace")
"""Parameters that make the kind of a kernel; kernels of one kind differ in stages, clusters, rasterization group, PDL or packing."""
SAME_KIND_PENALTY = 0.02
"""Part of its predicted time by which a proposal is postponed for each better one of its kind: so far predictions err within a kind."""
LOOK_AHEAD = 120
"""Proposals among which one of the other kind is looked for."""
LEADER_MARGIN = 1.08
"""Ratio of predicted times, to the best of all, up to which the best proposal of a kernel schedule is among the first."""


def diversified(by_schedule: Iterable[Iterator[Proposal]]) -> Iterator[Proposal]:
    """Yield the proposals of all kernel schedules, the fastest first, so that the first few are of several kinds.

    Leaders come first: the best proposal of each schedule within `LEADER_MARGIN` of the best of all, since the clock decides, too,
    which schedule wins. Each other one comes as if `SAME_KIND_PENALTY` slower for each better one of its kind.
    """
    started = [(best, proposals) for proposals in by_schedule if (best := next(proposals, None))]
    bests = sorted((best for best, _ in started), key=_by_time)
    leaders = [best for best in bests if best.predicted_secs <= LEADER_MARGIN * bests[0].predicted_secs]
    yield from leaders
    better_of_kind: Counter[tuple[Value, ...]] = Counter()
    postponed: list[tuple[float, int, Proposal]] = []
    for at, proposal in enumerate(heapq.merge(*(itertools.chain((best,), rest) for best, rest in started), key=_by_time)):
        while postponed and postponed[0][0] <= proposal.predicted_secs:
            yield heapq.heappop(postponed)[-1]
        kind = tuple(value for name, value in proposal.candidate.params if name in KIND_PARAMS)
        if proposal not in leaders:
            heapq.heappush(postponed, (proposal.predicted_secs * (1 + SAME_KIND_PENALTY * better_of_kind[kind]), at, proposal))
        better_of_kind[kind] += 1
    while postponed:
        yield heapq.heappop(postponed)[-1]


def in_turns(proposals: Iterator[Proposal]) -> Iterator[Proposal]:
    """Yield proposals; where the first has split-K, those with and without a workspace in turns, each kind in its order.

    Which of the two reductions of split-K is faster, the model does not know. One of the other kind is looked for among the next ones.
    """
    first = next(proposals, None)
    if first is None or ("split_k", 1) in first.candidate.params:
        yield from itertools.chain(filter(None, [first]), proposals)
        return
    held = deque([first])
    wanted: bool | None = None
    while True:
        held.extend(itertools.islice(proposals, LOOK_AHEAD - len(held)))
        if not held:
            return
        chosen = next((each for each in held if wanted in (None, _has_workspace(each))), held[0])
        held.remove(chosen)
        wanted = not _has_workspace(chosen)
        yield chosen


def _has_workspace(proposal: Proposal) -> bool:
    return ("workspace", 1) in proposal.candidate.params


def _by_time(proposal: Proposal) -> tuple[float, tuple[tuple[str, Value], ...]]:
    return proposal.predicted_secs, proposal.candidate.params
