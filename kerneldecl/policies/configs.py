"""Owns the tuner `configs`: configurations that the user gives, one by one or as a grid; all of them are measured.

Knows nothing of which configurations are good. What a configuration leaves open is taken from the best-ranked candidate that has the rest.

    policy = { name = "configs", configs = [{ template = "cpu_matmul", tile_m = 4, tile_n = 16 }] }
    policy = { name = "configs", key = ["n", "k"], configs = […] }
    policy = { name = "configs", grid = { template = "cpu_matmul", tile_m = [4, 6], tile_n = [16, 32] } }
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kerneldecl.errors import TuningError
from kerneldecl.model import Candidate, Proposal, Value
from kerneldecl.policies.shared.search_space import SearchSpace

IS_TUNER = True
TRIALS = 0

Config = Mapping[str, Value]
"""A template's name under `template`, and values of its parameters."""


@dataclass(frozen=True)
class Options:
    """What `configs` takes besides a budget: `configs` or `grid`, and by what they are keyed."""

    configs: tuple = ()  # type: ignore[type-arg]  # tables as pairs
    """Configurations, each a table with `template` and values of its parameters."""
    grid: tuple = ()  # type: ignore[type-arg]  # a table as pairs
    """A table with `template` and a list of values for each of its parameters: all combinations are tried."""
    key: tuple[str, ...] = ()
    """Attributes of the rule: entries with the same values of them, which differ in other sizes alone, share the winner of the first."""

    def problems(self) -> Iterator[str]:
        if bool(self.configs) == bool(self.grid):
            yield (
                "it tries nothing; give it configs = [{ template = …, … }] or grid = { template = …, … }"
                if not self.grid
                else ("configs and grid stand side by side; expected one of them")
            )
            return
        for position, config in enumerate(self.configs):
            if not (_is_table(config) and isinstance(dict(config).get("template"), str)):
                yield f"configs[{position}] has no template; write {{ template = NAME, PARAMETER = value, … }}"
        if self.grid and not (_is_table(self.grid) and isinstance(dict(self.grid).get("template"), str)):
            yield "grid has no template; write { template = NAME, PARAMETER = [value, …], … }"
        elif self.grid:
            yield from _grid_problems(dict(self.grid))


def configurations(search: SearchSpace, options: Options) -> tuple[Proposal, ...]:
    """Return a candidate for each configuration, in their order; raise TuningError for one that fits no template of the computation."""
    given: list[tuple[str, Config]] = [(f"configs[{position}]", dict(config)) for position, config in enumerate(options.configs)]
    given += [("grid", config) for config in _combinations(dict(options.grid))] if options.grid else []
    return tuple(dict.fromkeys(search.proposal(_completed(search, where, config)) for where, config in given))


def _is_table(value: object) -> bool:
    return isinstance(value, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in value)


def _grid_problems(grid: Config) -> Iterator[str]:
    lists = {name: values for name, values in grid.items() if name != "template"}
    if not lists:
        yield "its grid is empty; give it a list of values for a parameter"
    for name, values in lists.items():
        if not isinstance(values, tuple):
            yield f"{name} of its grid is no list; write {name} = [value, …]"
        elif not values:
            yield f"its grid is empty, for {name} has no value"


def _combinations(grid: Config) -> Iterator[Config]:
    names = [name for name in grid if name != "template"]
    for values in itertools.product(*(tuple_of(grid[name]) for name in names)):
        yield {"template": grid["template"], **dict(zip(names, values, strict=True))}


def tuple_of(value: Value) -> tuple[Value, ...]:
    return value if isinstance(value, tuple) else (value,)


def _completed(search: SearchSpace, where: str, config: Config) -> Candidate:
    """Return the best-ranked candidate with the configuration's values; one that names every parameter is taken as it stands."""
    template = str(config["template"])
    values = {name: value for name, value in config.items() if name != "template"}
    choices = search.choices(template)
    if not choices:
        known = ", ".join(search.templates) or "none"
        raise TuningError(f"{where} names template {template}, which does not fit this computation; those that do: {known}")
    if unknown := [name for name in values if name not in choices]:
        raise TuningError(f"{where} fits no template: {template} has no parameter {unknown[0]}, but {', '.join(choices)}")
    ordered = (*(each.candidate for each in search.ranked), *search.candidates)
    fitting = (each for each in ordered if each.template == template and values.items() <= dict(each.params).items())
    if found := next(fitting, None):
        return found
    if values.keys() == choices.keys():
        return Candidate.of(template, values)
    left = ", ".join(name for name in choices if name not in values)
    raise TuningError(f"{where} fits no candidate of {template} for this computation; name the other parameters, too: {left}")
