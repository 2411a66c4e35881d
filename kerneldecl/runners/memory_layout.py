"""Owns the layout of a kernel's arguments in a GPU's memory, and how many copies of them a cold cache needs.

Knows nothing of drivers, values or kernels.

    guard | input | guard | input | guard | output | guard

Guards are filled with one byte. Kernels must change neither guards nor inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT_BYTES = 256
"""Alignment of every argument: that of cudaMalloc, on which kernels may rely."""
GUARD_BYTES = 1 << 20
"""Guard behind each argument: a tile of a few rows of the widest matrices."""
MAX_CALLS = 64
"""Most launches in one sample."""


@dataclass(frozen=True)
class Placement:
    """The layout of one allocation."""

    offsets: tuple[int, ...]
    """Offset of each argument, in their order."""
    guards: tuple[tuple[int, int], ...]
    """Offset and bytes of each guard; a guard starts right behind an argument's last byte."""
    total_bytes: int


def place(sizes: Sequence[int], guard_bytes: int) -> Placement:
    """Return the placement of arguments of these sizes, with guards of `guard_bytes` or more before, between and behind them."""
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


def copies(set_bytes: int, touched_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """Return over how many argument sets the launches of a sample rotate.

    What launches touch of all sets exceeds twice the L2 cache, so that none of it is still there when it is used again; or there is a set
    for each launch of the longest sample, and none is used again. They take at most half of the free memory.
    """
    enough = min(MAX_CALLS, math.ceil(2 * l2_bytes / max(1, touched_bytes)))
    return max(1, min(enough, free_bytes // 2 // max(1, set_bytes)))


def most_calls(sets: int, touched_bytes: int, l2_bytes: int) -> int:
    """Return the most launches in a sample for which no argument set is used again while it is still in L2."""
    return MAX_CALLS if sets * touched_bytes >= 2 * l2_bytes else sets
