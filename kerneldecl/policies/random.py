"""Owns the tuner `random`: candidates of a search space drawn without a model, the same ones for the same seed.

Knows nothing of how a space is enumerated, of templates or of measurements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kerneldecl.model import Proposal, Trial
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.tuning import not_tried, shuffled

IS_TUNER = True
TRIALS = 64


@dataclass(frozen=True)
class Options:
    """What `random` takes besides a budget."""

    seed: int = 0

    def problems(self) -> Iterator[str]:
        yield from ()


def ask(search: SearchSpace, options: Options, trials: Sequence[Trial]) -> tuple[Proposal, ...]:
    """Return the next candidates of the seed's order that nobody has tried."""
    return not_tried(search, shuffled(search.candidates, options.seed), trials)
