"""Owns rows added to those that indices name: what an embedding's gradient, and a sum over the edges of a graph, are.

Knows nothing of how a schedule shares rows among threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from kerneldecl.arrays import Array
from kerneldecl.lazy import np
from kerneldecl.rule import Arg, Extent, Rule, Signature

from .shared.precision import accum_dtype, accum_tolerance, is_integer


@dataclass(frozen=True, kw_only=True)
class ScatterAdd(Rule):
    """Y = base, with updates[i] added to row indices[i], in the order of i (torch.index_add; without base a segment sum)."""

    rows: Extent
    """Rows of Y."""
    columns: Extent
    """Elements of a row."""
    updates: Extent
    """Rows that are added. Nothing checks that their indices lie inside."""
    base: bool = True
    """False adds to zeros: there is no base then."""
    index_dtype: Literal["int32", "int64"] = "int64"
    """Dtype of the indices."""
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int32", "int64"] = "float32"
    """Dtype of base, updates and Y; 16-bit ones are added up in float32. Integers wrap around."""

    def problems(self) -> Iterator[str]:
        if self.index_dtype == "int32" and self.rows > 2**31:
            yield f"rows {self.rows} is more than int32 counts; index_dtype int64 does"

    def signature(self) -> Signature:
        out = Arg("Y", (self.rows, self.columns), self.dtype)
        indices, updates = Arg("indices", (self.updates,), self.index_dtype), Arg("updates", (self.updates, self.columns), self.dtype)
        base = (Arg("base", out.shape, self.dtype),) if self.base else ()
        return Signature((indices, updates, *base), (out,))

    def lower(self) -> list[Any]:
        from kerneldecl.analysis.scatter import ScatterSizes
        from kerneldecl.compiler.scatter import ScatterSpec, scatter_add

        sizes = ScatterSizes(self.rows, self.columns, self.updates, self.dtype, self.index_dtype, self.base)
        return scatter_add(ScatterSpec(sizes))

    def reference(self, *inputs: Array) -> Array:
        indices, updates, *base = inputs
        wide = np.int64 if is_integer(self.dtype) else np.float64
        y = base[0].astype(wide) if base else np.zeros((self.rows, self.columns), wide)
        np.add.at(y, indices, updates.astype(wide))
        return y

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return random rows, many of which go to the same one, the first and the last among them."""
        _, *others = super().inputs(rng)
        indices = rng.integers(0, self.rows, self.updates)
        indices[rng.integers(0, self.updates, -(-self.updates // 8))] = self.rows // 2
        indices[:2] = np.array([self.rows - 1, 0])[: self.updates]
        return [indices.astype(self.index_dtype), *others]

    def takes_special_values(self) -> bool:
        """Say that sums of many numbers near the largest overflow or not by the order of additions to the base."""
        return False

    def flops(self) -> int:
        """Return one addition for each element that is added."""
        return self.updates * self.columns

    def tolerance(self) -> float:
        return accum_tolerance(self.dtype, accum_dtype(self.dtype), self.updates)
