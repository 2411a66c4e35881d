"""Owns reductions over chosen axes: sum, mean, maximum, minimum.

Knows nothing of how a schedule divides a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.axes import axes_problems, positions
from .shared.precision import accum_dtype, accum_tolerance, is_integer

WRAPPING = {"int8", "uint8", "int16"}


@dataclass(frozen=True, kw_only=True)
class Reduce(Rule):
    """Y = op of X over chosen axes."""

    op: Literal["sum", "max", "min", "mean"]
    """The reduction along the axes."""
    shape: tuple[Extent, ...]
    """Shape of X."""
    axes: tuple[int, ...]
    """Axes to reduce, each once; negative ones count from the last."""
    keepdims: bool = False
    """True keeps reduced axes, with extent 1."""
    dtype: Dtype = "float32"
    """Dtype of X and Y; narrow floating-point dtypes are accumulated in float32."""

    @property
    def _reduced(self) -> tuple[int, ...]:
        return tuple(sorted(positions(self.axes, len(self.shape))))

    @property
    def _terms(self) -> int:
        return math.prod(self.shape[axis] for axis in self._reduced)

    @property
    def _is_sum(self) -> bool:
        return self.op in {"sum", "mean"}

    def problems(self) -> Iterator[str]:
        yield from axes_problems(self.axes, len(self.shape))
        if not self.axes:
            yield "axes names no axis to reduce; write axes = [-1], or others"
        if self.op == "mean" and is_integer(self.dtype):
            yield f'op mean needs a floating-point dtype, not {self.dtype}; write dtype = "float32" or another'
        if self.op == "sum" and self.dtype in WRAPPING:
            yield f"op sum in dtype {self.dtype} would wrap around; int32 and int64 hold sums"

    def signature(self) -> Signature:
        kept = ((axis, extent) for axis, extent in enumerate(self.shape) if self.keepdims or axis not in self._reduced)
        out = tuple(1 if axis in self._reduced else extent for axis, extent in kept)
        return Signature((Arg("X", self.shape, self.dtype),), (Arg("Y", out, self.dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.rowwise import reduction

        return reduction(self.op, self.shape, self._reduced, keepdims=self.keepdims, dtype=self.dtype)

    def reference(self, *inputs: Array) -> Array:
        wide = np.int64 if is_integer(self.dtype) else np.float64
        reduction: Any = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[self.op]
        return np.asarray(reduction(inputs[0].astype(wide), axis=self._reduced, keepdims=self.keepdims))

    def flops(self) -> int:
        """Return one operation for each element of X, and for a mean one more for each of Y."""
        return math.prod(self.shape) + (math.prod(self.signature().outputs[0].shape) if self.op == "mean" else 0)

    def tolerance(self) -> float:
        return accum_tolerance(self.dtype, accum_dtype(self.dtype), self._terms if self._is_sum else 1)
