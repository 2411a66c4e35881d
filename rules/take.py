"""Owns the lookup of slices of an array along an axis by indices.

Knows nothing of how a schedule shares slices among threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.model import dtype_bytes
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.axes import axes_problems, positions


@dataclass(frozen=True, kw_only=True)
class Take(Rule):
    """Y = the slices of X along an axis that indices name, as numpy.take and torch.index_select. Nothing checks that indices lie inside."""

    shape: tuple[Extent, ...]
    """Shape of X."""
    indices: tuple[Extent, ...]
    """Shape of the indices; Y has their axes in the place of the axis."""
    axis: int = 0
    """The axis; a negative one counts from the last."""
    index_dtype: Literal["int32", "int64"] = "int64"
    """Dtype of the indices."""
    dtype: Dtype = "float32"
    """Dtype of X and Y."""

    @property
    def _axis(self) -> int:
        return positions([self.axis], len(self.shape))[0]

    def problems(self) -> Iterator[str]:
        if not self.indices:
            yield "indices has no extent; write indices = [512], or other extents"
        wrong = list(axes_problems([self.axis], len(self.shape)))
        yield from wrong
        if not wrong and self.index_dtype == "int32" and self.shape[self._axis] > 2**31:
            yield f"axis {self.axis} has {self.shape[self._axis]} elements, more than int32 counts; index_dtype int64 does"

    def signature(self) -> Signature:
        x, indices = Arg("X", self.shape, self.dtype), Arg("indices", self.indices, self.index_dtype)
        out = (*self.shape[: self._axis], *self.indices, *self.shape[self._axis + 1 :])
        return Signature((x, indices), (Arg("Y", out, self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te

        x, indices = (te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs)
        axis, count = self._axis, len(self.indices)

        def element(*at: Any) -> Any:
            return x(*at[:axis], indices(*at[axis : axis + count]), *at[axis + count :])

        return [x, indices, te.compute(self.signature().outputs[0].shape, element, name="Y")]

    def reference(self, *inputs: Array) -> Array:
        x, indices = inputs
        return np.asarray(x.take(indices, self._axis))

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return random values and random places along the axis, the first and the last among them."""
        x, _ = super().inputs(rng)
        extent = self.shape[self._axis]
        indices = rng.integers(0, extent, self.indices).astype(self.index_dtype)
        indices.reshape(-1)[:2] = np.array([extent - 1, 0])[: indices.size]
        return [x, indices]

    def flops(self) -> int:
        return 0

    def least_bytes(self) -> int:
        """Return the bytes of the indices, of the slices that are looked up, each once, and of Y."""
        count, extent = math.prod(self.indices), self.shape[self._axis]
        slices = (min(count, extent) + count) * math.prod(self.shape) // extent * dtype_bytes(self.dtype)
        return slices + count * dtype_bytes(self.index_dtype)

    def tolerance(self) -> float:
        """Return 0: elements are copied."""
        return 0.0
