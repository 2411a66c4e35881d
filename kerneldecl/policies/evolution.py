"""Owns the tuner `evolution`: mutation and crossover of what was fastest, over the search space of the policies.

Knows nothing of how a space is enumerated, of templates or of how candidates are measured.

It starts from the candidates that the policy's model ranks best and from what other policies have measured. Then each batch is bred from
the fastest: a child takes each parameter from either parent, and sometimes from anywhere in the space. A child that is no candidate
of the space is dropped. A genetic algorithm over a discrete space, as kernel_tuner and Ansor (Zheng et al.,
OSDI 2020, section 5.1) use it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from kerneldecl.model import Candidate, Proposal, Trial, Value
from kerneldecl.policies.shared.search_space import SearchSpace
from kerneldecl.policies.shared.tuning import BATCH, generator, not_tried

IS_TUNER = True
TRIALS = 64
PARENTS = 12
"""Fastest candidates that breed."""
TRIES = 40
"""Children bred for each that is wanted: most of them were tried before once the search closes in."""


@dataclass(frozen=True)
class Options:
    """What `evolution` takes besides a budget."""

    seed: int = 0
    mutation: Annotated[float, Ge(0.0), Le(1.0)] = 0.2
    """Probability that a child's parameter comes from anywhere in the space."""

    def problems(self) -> Iterator[str]:
        yield from ()


def ask(search: SearchSpace, options: Options, trials: Sequence[Trial]) -> tuple[Proposal, ...]:
    """Return the next batch: the model's best while nothing has run, then children of the fastest, then what nobody has tried."""
    in_space = set(search.candidates)
    timed = sorted((trial for trial in trials if trial.samples and trial.candidate in in_space), key=lambda trial: trial.run_secs)
    if not timed:
        return not_tried(search, (each.candidate for each in search.ranked), trials)
    rng = generator(options.seed, trials)
    parents = [trial.candidate for trial in timed[:PARENTS]]
    children = _children(search, parents, options.mutation, rng)
    return not_tried(search, (*children, *(each.candidate for each in search.ranked), *search.candidates), trials)


def _children(search: SearchSpace, parents: Sequence[Candidate], mutation: float, rng: random.Random) -> list[Candidate]:
    by_template: dict[str, dict[tuple[tuple[str, Value], ...], Candidate]] = {}
    for candidate in search.candidates:
        by_template.setdefault(candidate.template, {})[candidate.params] = candidate
    found: dict[Candidate, None] = {}
    for _ in range(TRIES * BATCH):
        mother, father = _drawn(parents, rng), _drawn(parents, rng)
        if mother.template != father.template:
            father = mother
        child = _child(search.choices(mother.template), dict(mother.params), dict(father.params), mutation, rng)
        if (params := tuple(sorted(child.items()))) in by_template[mother.template]:
            found.setdefault(by_template[mother.template][params])
    return [child for child in found if child not in parents]


def _drawn(parents: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Return a parent: the faster, the more often."""
    return parents[min(int(rng.expovariate(0.3)), len(parents) - 1)]


def _child(
    choices: Mapping[str, Sequence[Value]], mother: Mapping[str, Value], father: Mapping[str, Value], mutation: float, rng: random.Random
) -> dict[str, Value]:
    """Return a child's parameters: from either parent, and with the probability `mutation` from anywhere, one of them at least."""
    child = {name: rng.choice((value, father.get(name, value))) for name, value in mother.items()}
    mutated = [name for name in child if rng.random() < mutation] or [rng.choice(list(child))]
    return {**child, **{name: rng.choice(choices[name]) for name in mutated}}
