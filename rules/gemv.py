"""Owns GEMV: a matrix times a vector.

Knows nothing of tiles, targets or how it is scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array, by_rows, random_array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature

from .shared.epilogue import Epilogue
from .shared.precision import AccumDtype, OperandDtype, accum_dtype, accum_problems, accum_tolerance, largest_summand, out_dtype


@dataclass(frozen=True, kw_only=True)
class Gemv(Rule):
    """y = W @ x: a matrix times a vector."""

    n: Extent
    """Elements of y."""
    k: Extent
    """Elements of x: extent of the reduction."""
    layout: Literal["n", "t"] = "n"
    """Layout of W: n stores it as [n, k], t as [k, n]."""
    dtype: OperandDtype = "float32"
    """Dtype of W and x."""
    accum_dtype: AccumDtype | Literal[""] = ""
    """Dtype of the accumulators; by default float32, int32 for integers, float64 for float64."""
    out_dtype: Dtype | Literal[""] = ""
    """Dtype of y; by default dtype, int32 for integers."""

    @property
    def _accum(self) -> str:
        return accum_dtype(self.dtype, self.accum_dtype)

    @property
    def _out(self) -> Arg:
        return Arg("y", (self.n,), out_dtype(self.dtype, self.out_dtype))

    def problems(self) -> Iterator[str]:
        yield from accum_problems(self.dtype, self._accum, self._out.dtype)

    def signature(self) -> Signature:
        w = (self.n, self.k) if self.layout == "n" else (self.k, self.n)
        return Signature((Arg("W", w, self.dtype), Arg("x", (self.k,), self.dtype)), (self._out,))

    def lower(self) -> list[Any]:
        from tvm import te

        w, x = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]

        def element(row: Any) -> Any:
            k = te.reduce_axis((0, self.k), "k")
            weight = w(row, k) if self.layout == "n" else w(k, row)
            return te.sum(weight.astype(self._accum) * x(k).astype(self._accum), axis=k)

        cast = Epilogue((), self._accum, self._out)
        return [*inputs, cast.lower(lambda name: te.compute((self.n,), element, name=name), [])]

    def reference(self, *inputs: Array) -> Array:
        w, x = (inputs[0] if self.layout == "n" else inputs[0].T), inputs[1].astype(np.float64)
        return by_rows(np.empty(self.n), lambda rows: w[rows].astype(np.float64) @ x, self.k)

    def flops(self) -> int:
        return 2 * self.n * self.k

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        w, x = self.signature().inputs
        return [random_array(rng, w, 1 / math.sqrt(self.k)), random_array(rng, x)]

    def largest_input(self) -> float:
        return largest_summand(self._accum, self.k)

    def tolerance(self) -> float:
        return accum_tolerance(self._out.dtype, self._accum, self.k)
