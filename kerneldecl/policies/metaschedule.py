"""Owns the tuner `metaschedule`: TVM's space generation, evolutionary search and learned cost model.

Knows nothing of TVM: `compiler/metaschedule.py` answers for it. Its candidates are traces, built, verified and raced like all others.

It needs the extra `search`. What it has measured stands in a MetaSchedule database, `cache/metaschedule/`, from which a later search goes
on, and which stock TVM opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

IS_TUNER = True
TEMPLATES = ("trace",)
TRIALS = 64
ENGINE = "kerneldecl.compiler.metaschedule"


@dataclass(frozen=True)
class Options:
    """What `metaschedule` takes besides a budget."""

    seed: int = 0
    cost_model: Literal["xgb", "random"] = "xgb"
    """TVM's model that chooses among the candidates that evolution has bred."""
    population: Annotated[int, Ge(16), Le(4096)] = 128
    """Candidates of one generation; the model predicts each."""
    database: str = ""
    """Folder in the workspace of a MetaSchedule database whose best records are tried first."""

    def problems(self) -> Iterator[str]:
        if self.seed < 0:
            yield f"seed is {self.seed}; expected an integer of at least 0"
