"""Owns softmax along one axis, of elements that may be scaled and masked.

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
    """Y = exp(S - max) / sum(exp(S - max)) along one axis, where S = X * scale + M."""

    shape: tuple[Extent, ...]
    """Shape of X and Y."""
    axis: int = -1
    """The axis along which Y sums to 1; a negative one counts from the last."""
    scale: float = 1.0
    """Factor of X."""
    mask: tuple[Extent, ...] = ()
    """Shape of M, which is added and broadcasts as NumPy's arrays do, such as [1, 1, 512, 512]; without it there is no M."""
    dtype: FloatDtype = "float32"
    """Dtype of X and Y; 16-bit ones are computed in float32."""
    out_dtype: FloatDtype | Literal[""] = ""
    """Dtype of Y; by default dtype."""

    @property
    def _axis(self) -> int:
        return positions([self.axis], len(self.shape))[0]

    @property
    def _out_dtype(self) -> str:
        return self.out_dtype or self.dtype

    def problems(self) -> Iterator[str]:
        yield from axes_problems([self.axis], len(self.shape))
        own = self.shape[len(self.shape) - len(self.mask) :]
        if len(self.mask) > len(self.shape) or any(extent not in {1, whole} for extent, whole in zip(self.mask, own, strict=True)):
            yield f"mask {list(self.mask)} does not broadcast to shape {list(self.shape)}; write 1 or the same extent for each axis"

    def signature(self) -> Signature:
        masks = (Arg("M", self.mask, self.dtype),) if self.mask else ()
        return Signature((Arg("X", self.shape, self.dtype), *masks), (Arg("Y", self.shape, self._out_dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.rowwise import Scores, softmax

        return softmax(self.shape, self._axis, self.dtype, self._out_dtype, Scores(self.scale, self.mask))

    def reference(self, *inputs: Array) -> Array:
        x, *masks = (array.astype(np.float64) for array in inputs)
        x = x * self.scale + masks[0] if masks else x * self.scale
        powers = np.exp(x - x.max(axis=self.axis, keepdims=True))
        return np.asarray(powers / powers.sum(axis=self.axis, keepdims=True))

    def tolerance(self) -> float:
        """Return the relative error allowed. Results of long rows are below float16's normal numbers, and rounded to multiples of 2^-24."""
        mean = 1 / self.shape[self._axis]
        is_subnormal = self._out_dtype == "float16" and mean < SMALLEST_FLOAT16
        return super().tolerance() + (LEAST_FLOAT16 / 2 / mean if is_subnormal else 0.0)

    def flops(self) -> int:
        """Return five operations for each element: max, minus, exp, plus, divide; and one each for scale and mask."""
        return (5 + (self.scale != 1.0) + bool(self.mask)) * math.prod(self.shape)

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return standard normal values; a mask hides every eighth element or so, but none of the first ones of rows."""
        x, *masks = super().inputs(rng)
        for mask in masks:
            hidden = mask.astype(np.float64) > 1.15
            along = self._axis - (len(self.shape) - mask.ndim)
            if along >= 0:
                np.moveaxis(hidden, along, 0)[0] = False
            else:
                hidden[...] = False
            mask[hidden] = -np.inf
        return [x, *masks]

    def largest_input(self) -> float:
        """Return a number whose product with the scale, and sum with a mask, float32 holds to 1e-4: powers are those of differences."""
        return 32.0 if self.mask or self.scale != 1.0 else super().largest_input()
