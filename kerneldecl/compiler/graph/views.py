"""Owns the algebra of reshapes and transposes: any chain of them is one view, which splits axes, puts them in another order and joins them.

Knows nothing of TVM: a view is numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Shape = tuple[int, ...]


@dataclass(frozen=True)
class View:
    """An array whose elements are those of a source, in another order.

    `parts` are extents above 1 that the source's shape is split into, in row-major order. `axes` has the numbers of the parts that
    each axis of the result is joined from, outermost first: an axis of extent 1 has none.
    """

    parts: Shape
    axes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, shape: Shape) -> View | None:
        """Return the view of a whole array as it is; None where it is empty."""
        if not all(shape):
            return None
        numbers = itertools.count()
        return cls(tuple(extent for extent in shape if extent > 1), tuple((next(numbers),) if extent > 1 else () for extent in shape))

    @property
    def shape(self) -> Shape:
        return tuple(math.prod(self.parts[part] for part in axis) for axis in self.axes)

    @property
    def order(self) -> tuple[int, ...]:
        """Return the numbers of the parts in the order of the result."""
        return tuple(itertools.chain.from_iterable(self.axes))

    def permuted(self, axes: Sequence[int]) -> View:
        return View(self.parts, tuple(self.axes[axis] for axis in axes))

    def reshaped(self, shape: Shape) -> View | None:
        """Return the view in another shape; None where parts cannot be split into that."""
        extents = [self.parts[part] for part in self.order]
        steps = _steps(extents) | _steps(shape)
        if math.prod(extents) != math.prod(shape) or not all(
            small and large % small == 0 for small, large in itertools.pairwise(sorted(steps))
        ):
            return None
        split = self._split_at(steps)
        order, axes = list(split.order), []
        for extent in shape:
            axis: list[int] = []
            while math.prod(split.parts[part] for part in axis) < extent:
                axis.append(order.pop(0))
            axes.append(tuple(axis))
        return View(split.parts, tuple(axes))

    def _split_at(self, steps: set[int]) -> View:
        """Return the view with parts that end wherever one of the steps, sizes of what follows in the result, does."""
        pieces: dict[int, list[int]] = {}
        behind = 1
        for part in reversed(self.order):
            inner = sorted(step for step in steps if behind <= step <= behind * self.parts[part])
            pieces[part] = [large // small for small, large in itertools.pairwise(inner)][::-1]
            behind *= self.parts[part]
        starts = list(itertools.accumulate((len(pieces[part]) for part in range(len(self.parts))), initial=0))
        numbers = {part: tuple(range(starts[part], starts[part + 1])) for part in pieces}
        parts = tuple(extent for part in range(len(self.parts)) for extent in pieces[part])
        return View(parts, tuple(tuple(number for part in axis for number in numbers[part]) for axis in self.axes))

    def joined(self) -> View:
        """Return the same view with as few parts as its axes allow: neighbours of the source that one axis has side by side are one."""
        runs: list[list[int]] = []
        firsts: set[int] = {axis[0] for axis in self.axes if axis}
        for part in self.order:
            if runs and part == runs[-1][-1] + 1 and part not in firsts:
                runs[-1].append(part)
            else:
                runs.append([part])
        by_source = sorted(runs)
        number = {run[0]: at for at, run in enumerate(by_source)}
        axes = tuple(tuple(number[part] for part in axis if part in number) for axis in self.axes)
        return View(tuple(math.prod(self.parts[part] for part in run) for run in by_source), axes)

    def undone(self, other: View, shape: Shape) -> View | None:
        """Return this view as it is seen through the inverse of another: of a result as the other's source, which has this shape."""
        split = self.reshaped(tuple(other.parts[part] for part in other.order))
        return None if split is None else split.permuted([other.order.index(part) for part in range(len(other.parts))]).reshaped(shape)

    def sliced(self, axis: int, start: int, stop: int) -> Cut | None:
        """Return what a slice of an axis takes of the part that is its outermost one; None where it is no slice of that part alone."""
        parts = self.axes[axis]
        inner = math.prod(self.parts[part] for part in parts[1:])
        if not parts or start % inner or stop % inner:
            return None
        extents = list(self.parts)
        extents[parts[0]] = (stop - start) // inner
        return Cut(parts[0], start // inner, stop // inner, _without_units(View(tuple(extents), self.axes)))

    @property
    def is_reshape(self) -> bool:
        """Whether the elements keep their order, so that nothing needs to be moved."""
        return list(self.order) == sorted(self.order)

    def moved(self) -> tuple[Shape, tuple[int, ...]]:
        """Return the shape and the order of axes of the one transpose that the view needs; the order is sorted where it needs none."""
        merged = View(self.parts, (self.order,)).joined()
        return merged.parts, merged.order


class Cut(NamedTuple):
    """A slice of one part of a view."""

    part: int
    start: int
    stop: int
    view: View
    """The view of the slice."""


def _without_units(view: View) -> View:
    kept = [part for part, extent in enumerate(view.parts) if extent > 1]
    axes = tuple(tuple(kept.index(part) for part in axis if part in kept) for axis in view.axes)
    return View(tuple(view.parts[part] for part in kept), axes)


def _steps(extents: Sequence[int]) -> set[int]:
    """Return the sizes of what follows each axis, and of all."""
    return set(itertools.accumulate(reversed(extents), lambda size, extent: size * extent, initial=1))
