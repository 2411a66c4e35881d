"""Owns conversions from one dtype to another.

Knows nothing of how many elements a schedule takes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kerneldecl.arrays import Array, numpy_dtype
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Dtype, Extent, Rule, Signature, dtype_tolerance

from .shared.precision import is_integer


@dataclass(frozen=True, kw_only=True)
class Cast(Rule):
    """Y = X in another dtype: rounded to the nearest, ties to even; fractions of integers cut off. Integers that do not fit wrap around."""

    shape: tuple[Extent, ...]
    """Shape of X and Y."""
    dtype: Dtype
    """Dtype of X."""
    out_dtype: Dtype
    """Dtype of Y."""

    def problems(self) -> Iterator[str]:
        if not self.shape:
            yield "shape has no extent; write shape = [16, 64], or other extents"
        if self.dtype == self.out_dtype:
            yield f"dtype and out_dtype are both {self.dtype}; rule elementwise with op copy copies"

    def signature(self) -> Signature:
        return Signature((Arg("X", self.shape, self.dtype),), (Arg("Y", self.shape, self.out_dtype),))

    def lower(self) -> list[Any]:
        from tvm import te

        x = te.placeholder(self.shape, self.dtype, "X")
        return [x, te.compute(self.shape, lambda *at: x(*at).astype(self.out_dtype), name="Y")]

    def reference(self, *inputs: Array) -> Array:
        return inputs[0].astype(numpy_dtype(self.out_dtype))

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return values of both signs that every integer dtype of the result holds, fractions among them."""
        (x,) = super().inputs(rng)
        if is_integer(self.out_dtype) and not is_integer(self.dtype):
            low = 0.0 if self.out_dtype.startswith("uint") else -100.0
            x = rng.uniform(low, 100.0, self.shape).astype(numpy_dtype(self.dtype))
        return [x]

    def takes_special_values(self) -> bool:
        """Say that integers, and float8, which lacks infinities or overflows to the largest number, have no defined result of some."""
        return super().takes_special_values() and not self.out_dtype.startswith("float8")

    def flops(self) -> int:
        return 0

    def tolerance(self) -> float:
        """Return 0 for a conversion that rounds nothing; else what one rounding allows."""
        return 0.0 if is_integer(self.out_dtype) else dtype_tolerance(self.out_dtype)
