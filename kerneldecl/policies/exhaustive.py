"""Owns the tuner `exhaustive`: every candidate of a search space, in an order that no model decides.

Knows nothing of how a space is enumerated, of templates or of measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kerneldecl.model import Proposal, Trial
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.tuning import not_tried

IS_TUNER = True
TRIALS = 0


@dataclass(frozen=True)
class Options:
    """It has none but a budget."""

    def problems(self) -> Iterator[str]:
        yield from ()


def ask(search: SearchSpace, options: Options, trials: Sequence[Trial]) -> tuple[Proposal, ...]:
    """Return the next candidates that nobody has tried."""
    del options
    return not_tried(search, search.candidates, trials)
