"""Owns how a rule names the axes of an array, each once, negative ones counted from the last, and how shapes broadcast.

Knows nothing of what is done along the axes.
"""

from collections.abc import Iterator, Sequence
from typing import Any


def positions(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the axes counted from the first; those out of range are left as they are."""
    return tuple(axis + rank if -rank <= axis < 0 else axis for axis in axes)


def axes_problems(axes: Sequence[int], rank: int) -> Iterator[str]:
    for axis in axes:
        if not -rank <= axis < rank:
            yield f"axis {axis} is out of range for a shape of {rank} extents; write {-rank} to {rank - 1}"
    counted = positions(axes, rank)
    for position in sorted({axis for axis in counted if counted.count(axis) > 1}):
        yield f"axis {position} is named more than once; write it once"


def broadcast_problems(shapes: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield why arrays of such shapes do not broadcast to one of at least one extent."""
    from kerneldecl.lazy import np

    try:
        if not np.broadcast_shapes(*shapes):
            yield "shapes has no extent; write shapes = [[16, 64], [64]], or others"
    except ValueError:
        yield f"shapes {', '.join(map(str, shapes))} do not broadcast; write 1 or equal extents"


def broadcast_index(shape: Sequence[int], at: Sequence[Any]) -> tuple[Any, ...]:
    """Return where an array of a shape is read for an element of the array that it is broadcast to."""
    own = at[len(at) - len(shape) :]
    return tuple(0 if extent == 1 else place for extent, place in zip(shape, own, strict=True))
