"""Owns the lookup of rows of a table by indices.

Knows nothing of how a schedule shares rows among threads.
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


@dataclass(frozen=True, kw_only=True)
class Embedding(Rule):
    """Y[i] = table[indices[i]]: rows of a table. Indices lie inside the table; nothing checks them, as in TVM and CUDA."""

    indices: tuple[Extent, ...]
    """Shape of the indices, such as [batch, tokens]; Y has one axis more."""
    rows: Extent
    """Rows of the table."""
    columns: Extent
    """Elements of a row."""
    index_dtype: Literal["int32", "int64"] = "int64"
    """Dtype of the indices."""
    dtype: Dtype = "float32"
    """Dtype of the table and of Y."""

    def problems(self) -> Iterator[str]:
        if not self.indices:
            yield "indices has no extent; write indices = [512], or other extents"
        if self.index_dtype == "int32" and self.rows > 2**31:
            yield f"rows {self.rows} is more than int32 counts; index_dtype int64 does"

    def signature(self) -> Signature:
        table, indices = Arg("table", (self.rows, self.columns), self.dtype), Arg("indices", self.indices, self.index_dtype)
        return Signature((table, indices), (Arg("Y", (*self.indices, self.columns), self.dtype),))

    def lower(self) -> list[Any]:
        from tvm import te

        table, indices = (te.placeholder(arg.shape, arg.dtype, arg.name) for arg in self.signature().inputs)
        shape = self.signature().outputs[0].shape
        return [table, indices, te.compute(shape, lambda *at: table(indices(*at[:-1]), at[-1]), name="Y")]

    def reference(self, *inputs: Array) -> Array:
        table, indices = inputs
        return np.asarray(table[indices])

    def inputs(self, rng: np.random.Generator) -> list[Array]:
        """Return a random table and random rows of it, the first and the last among them."""
        table, _ = super().inputs(rng)
        indices = rng.integers(0, self.rows, self.indices).astype(self.index_dtype)
        indices.reshape(-1)[:2] = np.array([self.rows - 1, 0])[: indices.size]
        return [table, indices]

    def flops(self) -> int:
        return 0

    def least_bytes(self) -> int:
        """Return the bytes of the indices, of the rows that are looked up, each once, and of Y."""
        count = math.prod(self.indices)
        rows = (min(count, self.rows) + count) * self.columns * dtype_bytes(self.dtype)
        return rows + count * dtype_bytes(self.index_dtype)

    def tolerance(self) -> float:
        """Return 0: rows are copied."""
        return 0.0
