"""Owns the order of proposals for attention of few queries: the fastest first, several splits of keys and tiles among them.

Knows nothing of what the parameters are or of how their times are predicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import NamedTuple, TypeVar

Params = TypeVar("Params")


class Kind(NamedTuple):
    """What parameters share with others that are much like them."""

    split: Hashable
    tile: Hashable


def varied(
    timed: Iterable[tuple[float, Params]], kind_of: Callable[[Params], Kind], same_split: int, same_tile: int
) -> list[tuple[float, Params]]:
    """Return parameters with predicted seconds in the order given: so many of each split and of each tile first, then the rest."""
    splits, tiles = Counter[Hashable](), Counter[Hashable]()
    first, later = list[tuple[float, Params]](), list[tuple[float, Params]]()
    for each in timed:
        split, tile = kind_of(each[1])
        is_new = splits[split] < same_split and tiles[tile] < same_tile
        (first if is_new else later).append(each)
        splits[split] += is_new
        tiles[tile] += is_new
    return [*first, *later]
