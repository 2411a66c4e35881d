"""Owns iteration spaces of memory-bound computations, and of what is not one, as policies see them.

Knows nothing of what policies make of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kerneldecl.model import Access, Axis, Block, IterSpace


def axes(spatial: dict[str, int], reduce: dict[str, int] | None = None) -> tuple[Axis, ...]:
    return (*(Axis(*item, "spatial") for item in spatial.items()), *(Axis(*item, "reduce") for item in (reduce or {}).items()))


@dataclass(frozen=True)
class Streams:
    """Computations on operands of one dtype."""

    dtype: str

    def access(self, operand: str, block_axes: tuple[Axis, ...], *dims: int, dtype: str = "") -> Access:
        """Build an access that each dimension of which one axis indexes."""
        shape = tuple(block_axes[axis].extent for axis in dims)
        return Access(operand, shape, dtype or self.dtype, tuple(((axis, 1),) if block_axes[axis].extent > 1 else () for axis in dims))

    def add(self, rows: int, columns: int) -> IterSpace:
        ij = axes({"i": rows, "j": columns})
        block = Block("Y", ij, (self.access("A", ij, 0, 1), self.access("B", ij, 0, 1)), (self.access("Y", ij, 0, 1),), 1)
        return IterSpace((block,), ("A", "B"), ("Y",))

    def transpose(self, rows: int, columns: int) -> IterSpace:
        ij = axes({"i": rows, "j": columns})
        return IterSpace((Block("Y", ij, (self.access("X", ij, 1, 0),), (self.access("Y", ij, 0, 1),), 0),), ("X",), ("Y",))

    def row_sum(self, rows: int, columns: int) -> IterSpace:
        ik = axes({"i": rows}, {"k": columns})
        return IterSpace((Block("Y", ik, (self.access("X", ik, 0, 1),), (self.access("Y", ik, 0),), 1),), ("X",), ("Y",))

    def column_sum(self, rows: int, columns: int) -> IterSpace:
        jk = axes({"j": columns}, {"k": rows})
        return IterSpace((Block("Y", jk, (self.access("X", jk, 1, 0),), (self.access("Y", jk, 0),), 1),), ("X",), ("Y",))

    def softmax(self, rows: int, columns: int) -> IterSpace:
        ik, ij = axes({"i": rows}, {"k": columns}), axes({"i": rows, "j": columns})
        blocks = (
            Block("high", ik, (self.access("X", ik, 0, 1),), (self.access("high", ik, 0),), 1),
            Block("power", ij, (self.access("X", ij, 0, 1), self.access("high", ij, 0)), (self.access("power", ij, 0, 1),), 2),
            Block("total", ik, (self.access("power", ik, 0, 1),), (self.access("total", ik, 0),), 1),
            Block("Y", ij, (self.access("power", ij, 0, 1), self.access("total", ij, 0)), (self.access("Y", ij, 0, 1),), 1),
        )
        return IterSpace(blocks, ("X",), ("Y",))

    def gemv(self, n: int, k: int) -> IterSpace:
        nk = axes({"n": n}, {"k": k})
        reads = self.access("W", nk, 0, 1), self.access("x", nk, 1)
        return IterSpace((Block("y", nk, reads, (self.access("y", nk, 0),), 2),), ("W", "x"), ("y",))

    def matmul(self, m: int, n: int) -> IterSpace:
        mnk = axes({"m": m, "n": n}, {"k": 64})
        reads = self.access("A", mnk, 0, 2), self.access("B", mnk, 2, 1)
        return IterSpace((Block("C", mnk, reads, (self.access("C", mnk, 0, 1),), 2),), ("A", "B"), ("C",))
