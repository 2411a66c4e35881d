"""Owns a number of rows that is known when a kernel is called, as a value.

Knows nothing of how it is declared, nor of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


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
