"""Owns the tuner `cost_model`: a ranking model, learned from what was measured, chooses from the search space of the policies.

Knows nothing of the model: `tuning/cost_model.py` answers for it, since a policy has neither arrays nor files.

It needs the extra `search`. It is trained on all that the store knows of devices of this kind, of other shapes and operators, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

IS_TUNER = True
TRIALS = 64
ENGINE = "kerneldecl.tuning.cost_model"


@dataclass(frozen=True)
class Options:
    """What `cost_model` takes besides a budget."""

    seed: int = 0
    epsilon: Annotated[float, Ge(0.0), Le(1.0)] = 0.1
    """Share of each batch that is drawn without the model."""

    def problems(self) -> Iterator[str]:
        yield from ()
