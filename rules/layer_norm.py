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

from .shared.pointwise import cast
from .shared.precision import accum_dtype


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
        from tvm import te, tirx

        accum = accum_dtype(self.dtype)
        *rows, columns = self.shape
        inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        x, gamma, beta = (cast(read, accum) for read in inputs)
        count, eps = tirx.const(columns, accum), tirx.const(self.eps, accum)

        def sum_over_columns(read: Any) -> Any:
            k = te.reduce_axis((0, columns), "k")
            return lambda *row: te.sum(read(*row, k), axis=k)

        def squared(*i: Any) -> Any:
            return (x(*i) - mean(*i[:-1])) * (x(*i) - mean(*i[:-1]))

        def normalised(*i: Any) -> Any:
            deviation = tirx.rsqrt(squares(*i[:-1]) / count + eps)
            return ((x(*i) - mean(*i[:-1])) * deviation * gamma(i[-1]) + beta(i[-1])).astype(self.dtype)

        total = te.compute(rows, sum_over_columns(x), name="total")
        mean = te.compute(rows, lambda *row: total(*row) / count, name="mean")
        squares = te.compute(rows, sum_over_columns(squared), name="squares")
        return [*inputs, te.compute(self.shape, normalised, name="Y")]

    def reference(self, *inputs: Array) -> Array:
        x, gamma, beta = (array.astype(np.float64) for array in inputs)
        variance = x.var(axis=-1, keepdims=True)
        return np.asarray((x - x.mean(axis=-1, keepdims=True)) / np.sqrt(variance + self.eps) * gamma + beta)

    def flops(self) -> int:
        """Return eight operations for each element: plus; minus, square, plus; minus, times, times gamma, plus beta."""
        return 8 * math.prod(self.shape)
