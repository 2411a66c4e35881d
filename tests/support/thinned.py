"""Owns which of many cases run by default: the others are marked `slow`.

Knows nothing of what is tested.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def every(step: int, *factors: Iterable[Any]) -> list[Any]:
    """Return all combinations as parameters. Those whose places add up to a multiple of the step run by default: all of each factor.

    A tuple stands for several parameters.
    """
    listed = [list(factor) for factor in factors]
    places = [places for places in itertools.product(*(range(len(factor)) for factor in listed)) if sum(places) % step == 0]
    # Not so if the step is large beside the factors.
    assert all({at[i] for at in places} == set(range(len(factor))) for i, factor in enumerate(listed)) or len(listed) == 1
    chosen = set(places)
    found = []
    for at in itertools.product(*(range(len(factor)) for factor in listed)):
        values = [factor[i] for factor, i in zip(listed, at, strict=True)]
        found.append(_case(itertools.chain(*(value if isinstance(value, tuple) else (value,) for value in values)), at not in chosen))
    return found


def only(chosen: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return all cases as parameters. The chosen ones run by default: names, the first of a tuple's values."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert set(chosen) <= {case[0] for case in listed}
    return [_case(case, case[0] not in chosen) for case in listed]


def second(cases: Iterable[Any]) -> list[Any]:
    """Return all cases as parameters. Of those of each class, the first, the third and so on run by default."""
    met: Counter[type] = Counter()
    found = []
    for case in cases:
        found.append(_case((case,), bool(met[type(case)] % 2)))
        met[type(case)] += 1
    return found


def at(places: Collection[int], cases: Iterable[Any]) -> list[Any]:
    """Return all cases as parameters. Those at these places run by default."""
    listed = [case if isinstance(case, tuple) else (case,) for case in cases]
    assert max(places) < len(listed)
    return [_case(case, place not in places) for place, case in enumerate(listed)]


def _case(values: Iterable[Any], is_slow: bool) -> Any:
    return pytest.param(*values, marks=[pytest.mark.slow] * is_slow)
