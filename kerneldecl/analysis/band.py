"""Owns bands of attention: which keys each query sees, where the last one or the first one that it sees moves along with it.

Knows nothing of masks given as data, nor of kernels.
"""

from __future__ import annotations

from typing import NamedTuple, Self


class Band(NamedTuple):
    """Query i sees the keys from i + lower to i + upper, both included; None for no limit."""

    lower: int | None = None
    upper: int | None = None

    @classmethod
    def of(cls, queries: int, keys: int, *, own: int, is_causal: bool, window: int) -> Self:
        """Return the band of a causal mask and a sliding window; `own` is the first query's own key, each later query's is the next one.

        A query sees `window` keys before its own (0 for all of them), and none after its own if the mask is causal, else as many.
        """
        upper = own if is_causal else own + window if window else None
        lower = own - window if window else None
        return cls(
            None if lower is None or queries - 1 + lower <= 0 else lower,
            None if upper is None or upper >= keys - 1 else upper,
        )

    @property
    def is_full(self) -> bool:
        return self.lower is None and self.upper is None

    def pairs(self, queries: int, keys: int) -> int:
        """Return how many pairs of a query and a key that it sees there are."""
        below = 0 if self.lower is None else _pairs_up_to(self.lower - 1, queries, keys)
        return (queries * keys if self.upper is None else _pairs_up_to(self.upper, queries, keys)) - below

    def keys_of(self, rows: range, keys: int) -> range:
        """Return the keys that any of these queries sees; an empty range where there are none."""
        first = 0 if self.lower is None else max(0, rows.start + self.lower)
        stop = keys if self.upper is None else min(keys, rows.stop + self.upper)
        return range(first, max(first, stop))


EVERYTHING = Band()


def _pairs_up_to(upper: int, queries: int, keys: int) -> int:
    """Return how many pairs there are of a query i and a key of at most i + upper."""

    def up_to(count: int) -> int:
        """Return the sum of the keys that queries see of which the last one sees `count`, less or more than there are."""
        inside = max(0, min(count, keys))
        return inside * (inside + 1) // 2 + max(0, count - keys) * keys

    return up_to(queries + upper) - up_to(upper)
