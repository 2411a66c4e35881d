"""Owns the tuner `grid`: the candidates of a search space whose parameters have given values.

Knows nothing of how a space is enumerated, of templates or of measurements.

    policy = { name = "grid", values = { tile_m = [4, 6], order = ["nm"] } }
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kerneldecl.errors import TuningError
from kerneldecl.model import Candidate, Proposal, Trial
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.tuning import not_tried

IS_TUNER = True
TRIALS = 0


@dataclass(frozen=True)
class Options:
    """What `grid` takes besides a budget."""

    values: tuple = ()  # type: ignore[type-arg]  # pairs of a parameter's name and its values
    """Values of parameters, by name; those that are not named are free."""

    def problems(self) -> Iterator[str]:
        if not self.values:
            yield "its grid is empty; give it values = { parameter = [value, …] }, or ask exhaustive"
        for pair in self.values:
            if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], tuple)):
                yield "values is no table of lists; write values = { parameter = [value, …] }"
            elif not pair[1]:
                yield f"its grid is empty, for {pair[0]} has no value"


def ask(search: SearchSpace, options: Options, trials: Sequence[Trial]) -> tuple[Proposal, ...]:
    """Return the next candidates of the grid that nobody has tried; raise TuningError where the space has none of its points."""
    wanted = dict(options.values)
    chosen = [candidate for candidate in search.candidates if _is_on(candidate, wanted)]
    if not chosen:
        raise TuningError(_why_none(search, wanted))
    return not_tried(search, chosen, trials)


def _is_on(candidate: Candidate, wanted: dict[str, Any]) -> bool:
    params = dict(candidate.params)
    return all(name in params and params[name] in values for name, values in wanted.items())


def _why_none(search: SearchSpace, wanted: dict[str, Any]) -> str:
    for name, values in wanted.items():
        taken = {value for template in search.templates for value in search.choices(template).get(name, ())}
        if not taken:
            return f"no template of {search.policy} has the parameter {name}"
        if not taken & set(values):
            return f"{name} is none of {list(values)} anywhere in the space of {search.policy}, but one of {sorted(taken, key=repr)}"
    return f"no candidate of {search.policy} has these values together"
