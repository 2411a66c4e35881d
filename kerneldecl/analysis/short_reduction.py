"""Owns which reductions are short: a thread computes each result from a few vectors, as an elementwise function of the operand's slices.

Knows nothing of TVM or of which vectors are fast.
"""

from __future__ import annotations

MOST_ELEMENTS = 8
"""Elements that are reduced to one at most: a thread has all of them in flight, 16 bytes each, in 32 registers."""


def is_short(elements: int) -> bool:
    """Say whether a thread holds all elements that are reduced to one."""
    return elements <= MOST_ELEMENTS
