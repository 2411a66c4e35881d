"""Owns a number of rows that is known when a kernel is called, as a value.

Knows nothing of how it is declared, nor of kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

STEP = 1.26
"""Ratio of neighbouring numbers between tuned ones that kernels are made for, about: tiles that fit are at most a quarter too large."""
UNIT = 16
"""Rows that these numbers are multiples of."""
BETWEEN_TOP_K = 2
"""Candidates of each of these numbers that are built and timed at most."""


def numbers_between(tuned: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of rows between tuned ones for which kernels join those of the tuned, ascending; below `UNIT` rows none."""
    found: set[int] = set()
    for low, high in itertools.pairwise(max(number, UNIT) for number in tuned):
        steps = round(math.log(high / low) / math.log(STEP)) if high > low else 0
        found |= {math.ceil(low * (high / low) ** (step / steps) / UNIT) * UNIT for step in range(1, steps)}
    return tuple(sorted(number for number in found - {*tuned} if number < tuned[-1]))


@dataclass(frozen=True)
class Rows:
    """A number of rows that is known when a kernel is called, as a table declares it: `m = { upto = 4096, tuned = [1, 16, 128] }`."""

    name: str
    """Name of the kernel that takes any number of them: that of its entries without the number."""
    attribute: str
    place: int
    """Place of the number in the attribute's list; -1 where the attribute is the number."""
    upto: int
    tuned: tuple[int, ...]
    """Numbers that kernels are tuned for, ascending: an entry each."""

    def of(self, attrs: Mapping[str, Any]) -> int:
        """Return the number of rows in an entry's attributes."""
        value = attrs[self.attribute]
        return int(value if self.place < 0 else value[self.place])

    def is_between(self, attrs: Mapping[str, Any]) -> bool:
        """Say whether an entry's number stands between the declared ones: its kernel joins theirs, after a shorter search."""
        return self.of(attrs) not in self.tuned

    def at(self, attrs: Mapping[str, Any], rows: int) -> dict[str, Any]:
        """Return an entry's attributes with another number of rows."""
        listed = None if self.place < 0 else [*attrs[self.attribute][: self.place], rows, *attrs[self.attribute][self.place + 1 :]]
        return {**attrs, self.attribute: rows if listed is None else tuple(listed)}

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "attribute": self.attribute, "place": self.place, "upto": self.upto, "tuned": list(self.tuned)}

    @classmethod
    def from_json(cls, json: Mapping[str, Any]) -> Rows:
        return cls(**{**json, "tuned": tuple(json["tuned"])})


def rows_field(rows: Rows | None, attrs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return what a request holds of the rows that an entry's kernel takes; nothing where it takes its own number alone.

    A kernel for a single row takes no other: it is tuned as any entry is.
    """
    return {"rows": rows.to_json()} if rows and rows.of(dict(attrs)) > 1 else {}
