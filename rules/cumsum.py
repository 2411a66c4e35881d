"""Owns cumulative sums along an axis.

Knows nothing of how a schedule divides an axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, Rule, Signature

from .shared.axes import axes_problems, positions
from .shared.precision import accum_dtype, accum_tolerance, is_integer


@dataclass(frozen=True, kw_only=True)
class Cumsum(Rule):
    """Y[j] = the sum of X[k] over all k <= j along an axis, as numpy.cumsum and torch.cumsum."""

    shape: tuple[Extent, ...]
    """Shape of X and Y."""
    axis: int = -1
    """The axis along which elements are added up; a negative one counts from the last."""
    exclusive: bool = False
    """True leaves X[j] out of Y[j], so that sums start with zero."""
    reverse: bool = False
    """True adds up from the last element: Y[j] is the sum of X[k] over all k >= j."""
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int32", "int64"] = "float32"
    """Dtype of X and Y; 16-bit ones are added up in float32. Integers wrap around."""

    def problems(self) -> Iterator[str]:
        if not self.shape:
            yield "shape has no extent; write shape = [16, 64], or other extents"
        else:
            yield from axes_problems([self.axis], len(self.shape))

    @property
    def _axis(self) -> int:
        return positions([self.axis], len(self.shape))[0]

    def signature(self) -> Signature:
        return Signature((Arg("X", self.shape, self.dtype),), (Arg("Y", self.shape, self.dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.scan import ScanSpec, scan

        return scan(ScanSpec(self.shape, self._axis, self.dtype, self.exclusive, self.reverse))

    def reference(self, *inputs: Array) -> Array:
        x = inputs[0].astype(np.int64 if is_integer(self.dtype) else np.float64)
        x = np.flip(x, self._axis) if self.reverse else x
        y = np.cumsum(x, axis=self._axis)
        if self.exclusive:
            y = np.concatenate([np.zeros_like(y.take([0], self._axis)), y.take(range(y.shape[self._axis] - 1), self._axis)], self._axis)
        return np.ascontiguousarray(np.flip(y, self._axis) if self.reverse else y)

    def takes_special_values(self) -> bool:
        """Say that the sum of numbers near the largest overflows or not by the order of additions, which is the schedule's."""
        return False

    def flops(self) -> int:
        """Return one addition for each element."""
        return math.prod(self.shape)

    def tolerance(self) -> float:
        return accum_tolerance(self.dtype, accum_dtype(self.dtype), self.shape[self._axis])
