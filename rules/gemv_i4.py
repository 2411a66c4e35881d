"""Owns GEMV with 4-bit weights.

Knows nothing of how the weights came to be quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kerneldecl.arrays import Array, by_rows, numpy_dtype
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, FloatDtype, Rule, Signature

from .shared.epilogue import Epilogue
from .shared.precision import accum_dtype, accum_tolerance


@dataclass(frozen=True, kw_only=True)
class GemvI4(Rule):
    """y = W @ x with W packed to 4 bits: two weights a byte, low nibble first, each (nibble - 8) * scale of its group."""

    n: Extent
    """Elements of y."""
    k: Extent
    """Elements of x: extent of the reduction."""
    group: Extent = 128
    """Weights along k that share a scale; even, and a divisor of k."""
    dtype: FloatDtype = "float32"
    """Dtype of the scales, x and y; 16-bit ones are accumulated in float32."""

    def problems(self) -> Iterator[str]:
        if self.k % self.group:
            yield f"group {self.group} does not divide k {self.k}; write one that does"
        if self.group % 2:
            yield f"group {self.group} is odd, but two weights share a byte; write an even one"

    def signature(self) -> Signature:
        packed, scales = (self.n, self.k // 2), (self.n, self.k // self.group)
        inputs = Arg("W", packed, "uint8"), Arg("scale", scales, self.dtype), Arg("x", (self.k,), self.dtype)
        return Signature(inputs, (Arg("y", (self.n,), self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te, tirx

        w, scale, x = inputs = [te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs]
        accum, group_bytes = accum_dtype(self.dtype), self.group // 2

        def element(row: Any) -> Any:
            # Groups, bytes and nibbles as axes of their own keep every index affine, so that any schedule can read them.
            group = te.reduce_axis((0, self.k // self.group), "group")
            byte = te.reduce_axis((0, group_bytes), "byte")
            nibble = te.reduce_axis((0, 2), "nibble")
            # Shifted and masked as bytes: 64-bit indices would make vectors of eight bytes an element of it.
            packed = w(row, group * group_bytes + byte)
            weight = ((packed >> (nibble * 4).astype("uint8")) & tirx.const(15, "uint8")).astype("int32") - 8
            dequantised = weight.astype(accum) * scale(row, group).astype(accum)
            element_of_x = x(group * self.group + byte * 2 + nibble).astype(accum)
            return te.sum(dequantised * element_of_x, axis=[group, byte, nibble])

        cast = Epilogue((), accum, self.signature().outputs[0])
        return [*inputs, cast.lower(lambda name: te.compute((self.n,), element, name=name), [])]

    def reference(self, *inputs: Array) -> Array:
        w, scale, x = inputs
        wide = x.astype(np.float64)

        def part(rows: slice) -> Array:
            nibbles = np.stack([w[rows] & 15, w[rows] >> 4], axis=-1).reshape(-1, self.k).astype(np.float64)
            return (nibbles - 8) * scale[rows].astype(np.float64).repeat(self.group, axis=1) @ wide

        return by_rows(np.empty(self.n), part, self.k)

    def flops(self) -> int:
        """Return two operations for each weight and two more to dequantise it: minus 8, times scale."""
        return 4 * self.n * self.k

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return random nibbles, scales of 0.01 to 0.1 and a standard normal x."""
        w, scale, x = self.signature().inputs
        return [
            rng.integers(0, 256, w.shape, np.uint8),
            rng.uniform(0.01, 0.1, scale.shape).astype(numpy_dtype(self.dtype)),
            rng.standard_normal(x.shape).astype(numpy_dtype(self.dtype)),
        ]

    def tolerance(self) -> float:
        return accum_tolerance(self.dtype, accum_dtype(self.dtype), self.k)
