"""The tiles of an attention that its time is predicted from: all of few, a bounded number of very many, in the same proportions."""

from __future__ import annotations

import pytest

from kerneldecl.analysis.attention import AttentionSizes
from kerneldecl.analysis.band import Band
from kerneldecl.policies.gpu.attention_tiles import MOST_TILES, keys_of_tiles

MANY = 2**20 + 1
"""Queries of 65537 tiles of 16, the last of which has one row."""


def sizes(queries: int, *, is_causal: bool, window: int = 0) -> AttentionSizes:
    band = Band.of(queries, queries, own=0, is_causal=is_causal, window=window)
    return AttentionSizes(1, 8, 8, queries, queries, 64, 64, "float32", band)


def test_few_tiles_are_all_there() -> None:
    found = keys_of_tiles(sizes(MOST_TILES * 16, is_causal=True), 16)
    assert [keys.stop for keys in found] == [16 * (tile + 1) for tile in range(MOST_TILES)]


@pytest.mark.parametrize(("is_causal", "window"), [(False, 0), (True, 0), (True, 1000), (False, 1000)])
def test_many_tiles_are_a_bounded_number_that_sees_as_much_in_the_mean(is_causal: bool, window: int) -> None:
    attention = sizes(MANY, is_causal=is_causal, window=window)
    some, every = keys_of_tiles(attention, 16), keys_of_tiles(attention, 16, most=MANY)
    assert len(some) == MOST_TILES
    assert len(every) == 2**16 + 1
    assert (some[0], some[-1]) == (every[0], every[-1])
    assert sum(map(len, some)) / len(some) == pytest.approx(sum(map(len, every)) / len(every), rel=1e-3)
