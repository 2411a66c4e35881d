"""Owns a number of rows that is known when a kernel is called, as a value.

Knows nothing of how it is declared, nor of kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

UNIT = 16
"""Rows that numbers beside the tuned ones are multiples of."""
MANY = 128
"""Rows from which on time grows about as they do; with fewer, most of it goes to reading the operand that has none of them."""
PARTS, PARTS_OF_FEW = 4, 2
"""Numbers to each power of two, evenly spaced: from `MANY` rows on, and with fewer. Tiles have such numbers of rows, and so have tiles that
fill a GPU: 5 x 128 rows, or 4 x 192."""
CONSIDERED_PARTS = 8
"""The same of numbers that are looked at between tuned ones: of these, those are chosen at which predicted times rise."""
NEAR = 1 / 16
"""Share by which a number differs at least from a tuned one: tiles are the same for nearer ones."""
MOST_ABOVE = 4
"""Numbers at most above the last tuned one, where waves of tiles follow each other and less depends on the last."""
LOSS, LOSS_STEP = 0.03, 0.005
"""Share by which a kernel may be predicted to take longer than one for fewer rows would there, at first, and what is added to it while
there would be more kernels than evenly spaced ones."""
TOP_K_OF_FEW, TOP_K = 3, 2
"""Candidates of each of these numbers that are built and timed at most: of fewer rows than `MANY`, where those of one tile differ in
stages whose times are predicted alike, and of others."""


def considered_numbers(tuned: Sequence[int], upto: int) -> tuple[int, ...]:
    """Return the numbers of rows beside tuned ones for which kernels may join those of the tuned, ascending."""
    return tuple(sorted({*_between(tuned, CONSIDERED_PARTS, CONSIDERED_PARTS), *_above(tuned, upto)}))


def chosen_numbers(tuned: Sequence[int], upto: int, predicted: Mapping[int, float]) -> frozenset[int]:
    """Return the considered numbers for which kernels are tuned, given the least time that is predicted of a kernel for each number.

    A kernel takes no longer with fewer rows than it is tuned for. So from the last number on down, one joins whose kernel takes by `LOSS`
    less than that of the number chosen before. They are no more than the evenly spaced ones, which are chosen where nothing is predicted.
    """
    evenly = _between(tuned, PARTS, PARTS_OF_FEW)
    known = {number: secs for number, secs in predicted.items() if UNIT <= number <= tuned[-1]}
    if not all(number in known for number in tuned if number >= UNIT):
        return frozenset({*evenly, *_above(tuned, upto)})
    loss = LOSS
    while len(found := _where_time_rises(known, tuned, loss)) > len(evenly):
        loss += LOSS_STEP
    return frozenset({*found, *_above(tuned, upto)})


def _where_time_rises(known: Mapping[int, float], tuned: Sequence[int], loss: float) -> set[int]:
    found: set[int] = set()
    least, covering = math.inf, math.inf
    for number in sorted(known, reverse=True):
        least = min(least, known[number])  # of a kernel for this number or more
        if number in tuned or covering > (1 + loss) * least:
            covering = least
            found |= {number} - {*tuned}
    return found


def _between(tuned: Sequence[int], parts: int, parts_of_few: int) -> list[int]:
    return _apart(tuned, (number for number in _spaced(UNIT, tuned[-1], parts, parts_of_few) if number > tuned[0]))


def _above(tuned: Sequence[int], upto: int) -> list[int]:
    """Return few numbers above the last tuned one, to the bound."""
    found = _apart(tuned, (number for number in _spaced(max(tuned[-1], UNIT), upto, PARTS_OF_FEW, PARTS_OF_FEW) if number > tuned[-1]))
    return found[:: -max(1, -(-len(found) // MOST_ABOVE))]


def _apart(tuned: Sequence[int], numbers: Iterable[int]) -> list[int]:
    return [number for number in numbers if all(abs(number - each) > NEAR * each for each in tuned)]


def _spaced(least: int, most: int, parts: int, parts_of_few: int) -> list[int]:
    """Return the multiples of `UNIT` from `least` to `most` that divide the way from one power of two to the next into so many parts."""
    found: list[int] = []
    power = 1 << (least.bit_length() - 1)
    while power <= most:
        step = max(UNIT, power // (parts if power >= MANY else parts_of_few))
        found += [number for number in range(power, 2 * power, step) if least <= number <= most]
        power *= 2
    return found


def top_k_between(number: int) -> int:
    """Return how many candidates of a number of rows between tuned ones are built and timed at most."""
    return TOP_K_OF_FEW if number < MANY else TOP_K


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
