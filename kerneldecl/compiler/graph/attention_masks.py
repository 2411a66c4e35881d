"""Owns what is added to attention's scores: which part of it is causal, which axes the rest has, and whether it hides or adds.

Knows nothing of graphs but for the values that masks are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kerneldecl.compiler.graph.named_constants import Array
from kerneldecl.compiler.graph.views import Shape

HIDDEN = -3e4
"""What hides a key where it is added, or anything below: exp of it is 0 beside any score that float16 holds. float16's least number is
-65504, and models write that, or the least number of float32, or -inf."""
KINDS = {(0, 0, 1, 1): "qk", (1, 0, 1, 1): "bqk", (0, 1, 1, 1): "hqk", (1, 1, 1, 1): "bhqk", (1, 0, 0, 1): "bk"}
"""The rule's masks, by whether they have axes of batch, heads, queries and keys."""


@dataclass(frozen=True)
class Known:
    """A mask that is known: a band of keys that each query sees, and what is added besides."""

    is_causal: bool = False
    align: Literal["end", "start"] = "end"
    window: int = 0
    """Keys before its own that a query sees; 0 for all."""
    added: Array | None = None
    """Numbers with four axes, of one element where they are the same for all; None where nothing is left."""


def known_mask(values: Array) -> Known:
    """Return what numbers [batch, heads, queries, keys] that are added to scores are."""
    small = _shared(values)
    if not small.any():
        return Known()
    hidden = small <= HIDDEN
    is_exact = not (hidden & (small > -np.inf)).all(axis=-1).any()  # where no key is seen, numbers say what the result is
    band = _band(hidden[0, 0], values.shape[2:]) if is_exact and _is_same_for_heads(hidden) else None
    if band is None:
        return Known(added=small)
    left = np.where(hidden, np.zeros((), small.dtype), small)
    is_causal, align, window = band
    return Known(is_causal, align, window, _shared(left) if left.any() else None)


def kind_of(shape: Shape, whole: Shape) -> str | None:
    """Return which mask of the rule has a shape of four axes; None for none. An axis of one element counts as there, if needed."""
    for axes, name in KINDS.items():
        if all(extent == (full if has else 1) for extent, full, has in zip(shape, whole, axes, strict=True)):
            return name
    return None


def widened(shape: Shape, whole: Shape) -> Shape:
    """Return the smallest shape of the rule's masks that a shape of four axes can be broadcast to."""
    batch, heads, queries, keys = (have > 1 or want == 1 for have, want in zip(shape, whole, strict=True))
    if not heads and not queries and keys and (batch or whole[0] == 1):
        return (whole[0], 1, 1, whole[3])
    return (whole[0] if batch else 1, whole[1] if heads else 1, *whole[2:])


def _shared(values: Array) -> Array:
    """Return numbers with one element along each axis of batch, heads and queries along which all are the same."""
    for axis in range(3):
        first = values.take([0], axis)
        if values.shape[axis] > 1 and (values.strides[axis] == 0 or (values == first).all()):
            values = first
    return values


def _is_same_for_heads(hidden: Array) -> bool:
    return bool((hidden == hidden[:1, :1]).all())


def _band(hidden: Array, extents: tuple[int, ...]) -> tuple[bool, Any, int] | None:
    """Return whether hidden pairs are those behind a diagonal, which one, and the window before it; None where they are not."""
    queries, keys = extents
    if hidden.shape != extents or not hidden.any():
        return None
    row, column = np.ogrid[:queries, :keys]
    for align, own in (("end", row + keys - queries), ("start", row)):
        if np.array_equal(hidden, column > own):
            return True, align, 0
        window = _window(hidden, own)
        if window and np.array_equal(hidden, (column > own) | (column < own - window)):
            return True, align, window
    return None


def _window(hidden: Array, own: Array) -> int:
    """Return how many keys before its own the last query sees; 0 where it sees none, or its own is not there."""
    last = int(own[-1, 0])
    seen = np.flatnonzero(~hidden[-1])
    return last - int(seen[0]) if seen.size and 0 <= last < hidden.shape[1] else 0
