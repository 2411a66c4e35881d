"""Owns the order in which tilings on wgmma are tried, where their model alone does not tell which comes first.

Knows nothing of how tilings come about or of what they are expected to take.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence

from kerneldecl.model import Proposal, Value

FORM = ("block_m", "block_n", "consumers", "schedule", "split", "swap", "stream")
SPREAD = 0.02
"""How much less is expected of a tiling for each one before it that differs in stages, clusters or raster alone: so far the model errs."""
DOUBT = 1.08
"""How much behind the best of all the best of a schedule may be and still be among the first."""


def spread(proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """Return proposals in another order, so that the first few are of several forms: `SPREAD` for each before it of its own.

    What is best of each schedule comes first, unless `DOUBT` says that it is behind: which of them wins depends on the clock, too.
    """
    seen: Counter[tuple[Value, ...]] = Counter()
    expected = []
    for proposal in proposals:
        form = tuple(value for name, value in proposal.candidate.params if name in FORM)
        expected.append((proposal.predicted_secs * (1 + SPREAD * seen[form]), proposal))
        seen[form] += 1
    leaders = {_schedule(proposal): proposal for proposal in reversed(proposals)}
    near = [proposal for proposal in proposals if proposal is leaders[_schedule(proposal)] and _is_near(proposal, proposals[0])]
    ordered = (proposal for _, proposal in sorted(expected, key=operator.itemgetter(0)))
    return (*near, *(proposal for proposal in ordered if not any(proposal is leader for leader in near)))


def _is_near(proposal: Proposal, best: Proposal) -> bool:
    return proposal.predicted_secs <= DOUBT * best.predicted_secs


def _schedule(proposal: Proposal) -> tuple[Value, bool]:
    params = dict(proposal.candidate.params)
    return params["schedule"], params["stream"] != 0
