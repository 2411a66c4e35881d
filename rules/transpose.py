"""Owns the permutation of an array's axes.

Knows nothing of how a schedule keeps both sides' accesses contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.axes import axes_problems, positions


@dataclass(frozen=True, kw_only=True)
class Transpose(Rule):
    """Y = X with its axes permuted, as numpy.transpose."""

    shape: tuple[Extent, ...]
    """Shape of X."""
    axes: tuple[int, ...]
    """Axis of X for each axis of Y; negative ones count from the last."""
    dtype: Dtype = "float32"
    """Dtype of X and Y."""

    def problems(self) -> Iterator[str]:
        yield from axes_problems(self.axes, len(self.shape))
        if len(self.axes) != len(self.shape):
            yield f"axes names {len(self.axes)} axes, but shape has {len(self.shape)} extents; write each axis once"

    def signature(self) -> Signature:
        out = tuple(self.shape[axis] for axis in self.axes)
        return Signature((Arg("X", self.shape, self.dtype),), (Arg("Y", out, self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te

        x_arg, y = self.signature().args
        x = te.placeholder(x_arg.shape, x_arg.dtype, x_arg.name)
        axes = positions(self.axes, len(self.shape))
        source = [axes.index(axis) for axis in range(len(axes))]
        return [x, te.compute(y.shape, lambda *i: x(*(i[position] for position in source)), name=y.name)]

    def reference(self, *inputs: Array) -> Array:
        return np.transpose(inputs[0], self.axes)

    def flops(self) -> int:
        return 0
