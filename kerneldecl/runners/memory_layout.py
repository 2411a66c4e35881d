"""Owns where a kernel's arguments lie in a GPU's memory, and how many copies of them a cold cache needs.

Knows nothing of drivers, values or kernels.

    guard | input | guard | input | guard | output | guard

Guards are filled with one byte. They and the inputs are what no kernel may change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 256
"""Of every argument: what cudaMalloc gives, which kernels may rely on."""
GUARD_BYTES = 1 << 20
"""Behind each argument: a tile of a few rows of the widest matrices at hand."""
MAX_CALLS = 64
"""Launches of one sample, at most."""


@dataclass(frozen=True)
class Placement:
    """Offsets in one piece of memory."""

    offsets: tuple[int, ...]
    """Of the arguments, in their order."""
    guards: tuple[tuple[int, int], ...]
    """Offset and bytes of each stretch that belongs to no argument; a guard begins right behind an argument's last byte."""
    total_bytes: int


def place(sizes: Sequence[int], guard_bytes: int) -> Placement:
    """Return where arguments of so many bytes go, with at least so many bytes before, between and behind them."""
    offsets: list[int] = []
    guards: list[tuple[int, int]] = []
    end = 0
    for size in sizes:
        start = _aligned(end + guard_bytes)
        guards.append((end, start - end))
        offsets.append(start)
        end = start + size
    total = _aligned(end + guard_bytes)
    guards.append((end, total - end))
    return Placement(tuple(offsets), tuple((start, size) for start, size in guards if size), total)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def copies(set_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """Return how many sets of arguments the launches of a sample take in turn.

    Together they exceed twice the L2 cache, so that none is still there when its turn comes again; or there is one for
    each launch of the longest sample, none of which comes again. Half of the free memory is enough for them.
    """
    enough = min(MAX_CALLS, math.ceil(2 * l2_bytes / max(1, set_bytes)))
    return max(1, min(enough, free_bytes // 2 // max(1, set_bytes)))


def most_calls(sets: int, set_bytes: int, l2_bytes: int) -> int:
    """Return the launches that one sample may have: no set that is still in the cache comes again."""
    return MAX_CALLS if sets * set_bytes >= 2 * l2_bytes else sets
