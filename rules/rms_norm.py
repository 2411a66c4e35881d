"""Owns normalisation by the root mean square over the last axis.

Knows nothing of how many passes over its input a schedule makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Gt

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature


@dataclass(frozen=True, kw_only=True)
class RmsNorm(Rule):
    """Y = X / sqrt(mean(X * X) + eps) * gamma, over the last axis."""

    shape: tuple[Extent, ...]
    """Shape of X and Y; gamma has the last extent."""
    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the mean of squares."""
    dtype: FloatDtype = "float32"
    """Dtype of all arguments; 16-bit ones are computed in float32."""

    def problems(self) -> Iterator[str]:
        if not self.shape:
            yield "shape has no extent"

    def signature(self) -> Signature:
        inputs = Arg("X", self.shape, self.dtype), Arg("gamma", self.shape[-1:], self.dtype)
        return Signature(inputs, (Arg("Y", self.shape, self.dtype),))

    def lower(self) -> list[Any]:
        """Return the computation in the stages that Relax legalises rms_norm to."""
        from kerneldecl.compiler.rowwise import rms_norm

        return rms_norm(self.shape, self.eps, self.dtype)

    def reference(self, *inputs: Array) -> Array:
        x, gamma = (array.astype(np.float64) for array in inputs)
        return np.asarray(x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.eps) * gamma)

    def flops(self) -> int:
        """Return four operations for each element: square, plus, times 1 / rms, times gamma."""
        return 4 * math.prod(self.shape)
