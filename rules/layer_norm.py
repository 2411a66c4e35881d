"""Owns layer normalisation over the last axis.

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
class LayerNorm(Rule):
    """Y = (X - mean) / sqrt(variance + eps) * gamma + beta, over the last axis."""

    shape: tuple[Extent, ...]
    """Shape of X and Y; gamma and beta have the last extent."""
    eps: Annotated[float, Gt(0)] = 1e-5
    """Added to the variance."""
    dtype: FloatDtype = "float32"
    """Dtype of all arguments; 16-bit ones are computed in float32."""

    def problems(self) -> Iterator[str]:
        if not self.shape:
            yield "shape has no extent"

    def signature(self) -> Signature:
        row = self.shape[-1:]
        inputs = Arg("X", self.shape, self.dtype), Arg("gamma", row, self.dtype), Arg("beta", row, self.dtype)
        return Signature(inputs, (Arg("Y", self.shape, self.dtype),))

    def lower(self) -> list[Any]:
        from kerneldecl.compiler.rowwise import layer_norm

        return layer_norm(self.shape, self.eps, self.dtype)

    def reference(self, *inputs: Array) -> Array:
        x, gamma, beta = (array.astype(np.float64) for array in inputs)
        variance = x.var(axis=-1, keepdims=True)
        return np.asarray((x - x.mean(axis=-1, keepdims=True)) / np.sqrt(variance + self.eps) * gamma + beta)

    def flops(self) -> int:
        """Return eight operations for each element: plus; minus, square, plus; minus, times, times gamma, plus beta."""
        return 8 * math.prod(self.shape)
