"""Owns the places of the largest and the smallest elements along an axis.

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


@dataclass(frozen=True, kw_only=True)
class ArgReduce(Rule):
    """Y = the index of the largest (argmax) or smallest (argmin) element of X along an axis, the first of equals."""

    op: Literal["argmax", "argmin"]
    """Which element is looked for."""
    shape: tuple[Extent, ...]
    """Shape of X."""
    axis: int = -1
    """The axis along which it is looked for, which Y does not have; a negative one counts from the last."""
    index_dtype: Literal["int32", "int64"] = "int64"
    """Dtype of Y."""
    dtype: Dtype = "float32"
    """Dtype of X."""

    @property
    def _axis(self) -> int:
        return positions([self.axis], len(self.shape))[0]

    def problems(self) -> Iterator[str]:
        if len(self.shape) < 2:
            yield f"shape has {len(self.shape)} extents; expected at least 2, one of which Y keeps"
        else:
            yield from axes_problems([self.axis], len(self.shape))

    def signature(self) -> Signature:
        kept = self.shape[: self._axis] + self.shape[self._axis + 1 :]
        return Signature((Arg("X", self.shape, self.dtype),), (Arg("Y", kept, self.index_dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.arg_reduce import ArgSpec, arg_reduce

        return arg_reduce(ArgSpec(self.shape, self._axis, self.op == "argmax", self.dtype, self.index_dtype))

    def reference(self, *inputs: Array) -> Array:
        find = np.argmax if self.op == "argmax" else np.argmin
        return np.asarray(find(inputs[0].astype(np.float64 if "float" in self.dtype else np.int64), axis=self._axis), self.index_dtype)

    def flops(self) -> int:
        """Return two comparisons for each element of X."""
        return 2 * math.prod(self.shape)

    def tolerance(self) -> float:
        """Return 0: a place is right or wrong."""
        return 0.0
