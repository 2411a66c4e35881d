"""Owns how a rule names the axes of an array: each once, negative ones counted from the last.

Knows nothing of what is done along the axes.
"""

from collections.abc import Iterator, Sequence


def positions(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the axes counted from the first; those out of range are left as they are."""
    return tuple(axis + rank if -rank <= axis < 0 else axis for axis in axes)


def axes_problems(axes: Sequence[int], rank: int) -> Iterator[str]:
    for axis in axes:
        if not -rank <= axis < rank:
            yield f"axis {axis} is out of range for a shape of {rank} extents"
    counted = positions(axes, rank)
    for position in sorted({axis for axis in counted if counted.count(axis) > 1}):
        yield f"axis {position} is named more than once"
