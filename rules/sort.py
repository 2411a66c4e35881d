"""Owns the sorting of rows: elements in order, and where they were.

Knows nothing of how a schedule sorts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .shared.row_sort import RowSortRule


@dataclass(frozen=True, kw_only=True)
class Sort(RowSortRule):
    """values, indices = the elements of each row in order, and where they were (argsort). The sort is stable; NaN is the largest."""

    descending: bool = False
    """True puts the largest element first, and NaN, the largest value as in torch and NumPy, before all. -0 equals 0."""

    def count(self) -> int:
        return self.shape[-1] if self.shape else 0

    def is_largest_first(self) -> bool:
        return self.descending
