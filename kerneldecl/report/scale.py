"""Owns axes: where a value stands on one, and which values are worth a tick.

Knows nothing of what is drawn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Place = Callable[[float], float]
"""Where a value stands."""


@dataclass(frozen=True)
class Linear:
    """An axis from a value to another, drawn from a place to another."""

    low: float
    high: float
    start: float
    end: float

    @functools.cached_property
    def slope(self) -> float:
        """How far apart two values stand that differ by one."""
        return (self.end - self.start) / (self.high - self.low or 1.0)

    def __call__(self, value: float) -> float:
        return self.start + self.slope * (value - self.low)

    def ticks(self, most: int = 6) -> list[float]:
        """Return round values, `most` at most: multiples of 1, 2 or 5 times a power of ten."""
        step = next(step for step in _steps(self.high - self.low) if (self.high - self.low) / step <= most - 1)
        first = math.ceil(self.low / step - 1e-9)
        return [round(each * step, 12) for each in range(first, math.floor(self.high / step + 1e-9) + 1)]


def _steps(span: float) -> Iterator[float]:
    power = math.floor(math.log10(span or 1.0)) - 1
    while True:
        yield from (each * 10.0**power for each in (1, 2, 5))
        power += 1


@dataclass(frozen=True)
class Log:
    """An axis of powers, between values above 0."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * math.log(value / self.low) / (math.log(self.high / self.low) or 1.0)

    def ticks(self) -> list[float]:
        """Return powers of ten; where these are few, 2 and 5 times them as well."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in ((1.0,), (1.0, 2.0, 5.0), (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)):
            found = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
            within = [value for value in found if self.low * 0.999 <= value <= self.high * 1.001]
            if len(within) >= 3:
                break
        return within
