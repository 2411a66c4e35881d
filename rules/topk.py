"""Owns the k largest or smallest elements of rows, in order, and where they are.

Knows nothing of how a schedule finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerneldecl.rule import Extent

from .shared.row_sort import RowSortRule


@dataclass(frozen=True, kw_only=True)
class Topk(RowSortRule):
    """values, indices = the k largest elements of each row, the largest first, and where they are; of equal ones the earlier first."""

    k: Extent
    """Elements of a row that are wanted, in order; 1 to all of them."""
    largest: bool = True
    """False wants the smallest elements, the smallest first. NaN is the largest value, as in torch, and -0 equals 0."""

    def count(self) -> int:
        return self.k

    def is_largest_first(self) -> bool:
        return self.largest
