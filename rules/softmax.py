"""Owns softmax along one axis.

Knows nothing of how many passes over its input a schedule makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature

from .shared.axes import axes_problems, positions

SMALLEST_FLOAT16, LEAST_FLOAT16 = 2.0**-14, 2.0**-24
"""The least normal float16, and the least of all."""


@dataclass(frozen=True, kw_only=True)
class Softmax(Rule):
    """Y = exp(X - max) / sum(exp(X - max)) along one axis."""

    shape: tuple[Extent, ...]
    """Shape of X and Y."""
    axis: int = -1
    """The axis along which Y sums to 1; a negative one counts from the last."""
    dtype: FloatDtype = "float32"
    """Dtype of X and Y; 16-bit ones are computed in float32."""
    out_dtype: FloatDtype | Literal[""] = ""
    """Dtype of Y; by default dtype."""

    @property
    def _out_dtype(self) -> str:
        return self.out_dtype or self.dtype

    def problems(self) -> Iterator[str]:
        yield from axes_problems([self.axis], len(self.shape))

    def signature(self) -> Signature:
        return Signature((Arg("X", self.shape, self.dtype),), (Arg("Y", self.shape, self._out_dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.rowwise import softmax

        (axis,) = positions([self.axis], len(self.shape))
        return softmax(self.shape, axis, self.dtype, self._out_dtype)

    def reference(self, *inputs: Array) -> Array:
        x = inputs[0].astype(np.float64)
        powers = np.exp(x - x.max(axis=self.axis, keepdims=True))
        return np.asarray(powers / powers.sum(axis=self.axis, keepdims=True))

    def tolerance(self) -> float:
        """Return the relative error allowed. Results of long rows are below float16's normal numbers, and rounded to multiples of 2^-24."""
        (axis,) = positions([self.axis], len(self.shape))
        mean = 1 / self.shape[axis]
        is_subnormal = self._out_dtype == "float16" and mean < SMALLEST_FLOAT16
        return super().tolerance() + (LEAST_FLOAT16 / 2 / mean if is_subnormal else 0.0)

    def flops(self) -> int:
        """Return five operations for each element: max, minus, exp, plus, divide."""
        return 5 * math.prod(self.shape)
