"""Owns the tests of the layout of arguments in a GPU's memory and of the number of their copies.

Knows nothing of drivers.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kerneldecl.runners.memory_layout import ALIGNMENT_BYTES, MAX_CALLS, copies, most_calls, place

SIZES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=6)
L2_BYTES = 60 << 20


@given(SIZES, st.sampled_from([0, 1, 4096, 1 << 20]))
def test_every_byte_belongs_to_an_argument_or_to_a_guard(sizes: list[int], guard_bytes: int) -> None:
    placed = place(sizes, guard_bytes)
    pieces = sorted([*zip(placed.offsets, sizes, strict=True), *placed.guards])
    end = 0
    for start, size in pieces:
        assert start == end
        end = start + size
    assert end == placed.total_bytes
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in placed.offsets)


@given(SIZES, st.sampled_from([1, 4096, 1 << 20]))
def test_every_argument_has_a_guard_before_and_right_behind_it(sizes: list[int], guard_bytes: int) -> None:
    placed = place(sizes, guard_bytes)
    starts = dict(placed.guards)
    ends = {start + size: size for start, size in placed.guards}
    for offset, size in zip(placed.offsets, sizes, strict=True):
        assert starts[offset + size] >= guard_bytes
        assert ends[offset] >= guard_bytes


@given(st.integers(1, 1 << 34), st.integers(1 << 20, 128 << 20))
def test_no_argument_set_is_in_l2_when_it_is_used_again(set_bytes: int, l2_bytes: int) -> None:
    sets = copies(set_bytes, set_bytes, l2_bytes, 1 << 40)
    calls = most_calls(sets, set_bytes, l2_bytes)
    assert 1 <= sets <= MAX_CALLS
    assert calls <= sets or sets * set_bytes >= 2 * l2_bytes
    assert calls == MAX_CALLS, "with enough memory a sample may be as long as any"


@pytest.mark.parametrize(
    ("set_bytes", "touched_bytes", "free_bytes", "sets", "calls"),
    [
        (6 << 20, 6 << 20, 100 << 30, 20, 64),
        (5 << 10, 5 << 10, 100 << 30, 64, 64),
        (3 << 29, 3 << 29, 100 << 30, 1, 64),
        (1 << 30, 6 << 20, 100 << 30, 20, 64),
        (6 << 20, 6 << 20, 36 << 20, 3, 3),
        (6 << 20, 6 << 20, 1 << 20, 1, 1),
    ],
    ids=["gemm of 1024", "tiny", "larger than the cache", "few rows of a large table", "little memory", "no memory"],
)
def test_sets_and_launches(set_bytes: int, touched_bytes: int, free_bytes: int, sets: int, calls: int) -> None:
    assert copies(set_bytes, touched_bytes, L2_BYTES, free_bytes) == sets
    assert most_calls(sets, touched_bytes, L2_BYTES) == calls
