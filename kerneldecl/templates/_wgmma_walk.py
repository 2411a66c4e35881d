"""Owns how a kernel on wgmma walks over tiles, and what it sees of sums and of staging buffers on its way.

Knows nothing of loading, multiplying or storing.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kerneldecl.templates._wgmma_results import each
from kerneldecl.templates._wgmma_sizes import Kernel


class At:
    """A chunk of the staging buffers."""

    def __init__(self, staging: Any, worker: Any, turn: Any) -> None:
        self._staging, self._place = staging, (worker, turn)

    def ptr_to(self, index: list[Any]) -> Any:
        return self._staging.ptr_to([*self._place, *index])

    def __getitem__(self, index: Any) -> Any:
        return self._staging[(*self._place, index)]


class Sums:
    """The sums of one of a consumer's slabs, in their own dtype."""

    def __init__(self, kernel: Kernel, acc: Any, slab: Any) -> None:
        self._first, self._packing = slab * (kernel.tiles.block_n // 2), kernel.packing
        self._registers, self._sums = acc, kernel.as_sums(acc)

    def __getitem__(self, index: Any) -> Any:
        return self._sums[self._first + index]

    def pair(self, index: Any) -> Any:
        """Return the register that two neighbours share, the first of an even place; None where each has one of its own."""
        return self._registers[(self._first + index) // 2] if self._packing == 2 else None


@T.meta_class
class Walk:
    """The tiles of a cluster, one after the other: batch, row and column in units of clusters' tiles."""

    def __init__(self, kernel: Kernel, first: Any, step: int) -> None:
        self.kernel = kernel
        self.step = step
        self.linear = T.local_scalar("int32")
        self.batch = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.column = T.local_scalar("int32")
        self._start(first)

    @T.inline
    def _start(self, first):
        self.linear = first
        self._place()

    @T.inline
    def _place(self):
        rows, columns = each(self.kernel.blocks)
        group = T.meta_var(min(self.kernel.tiles.raster, rows))
        place = T.meta_var(self.linear % (rows * columns) if self.kernel.grid[0] > 1 else self.linear)
        start = T.meta_var(place // (group * columns) * group)
        height = T.meta_var(group if rows % group == 0 else T.min(rows - start, group))
        self.batch = self.linear // (rows * columns) if self.kernel.grid[0] > 1 else 0
        self.row = start + place % (group * columns) % height
        self.column = place % (group * columns) // height

    @T.inline
    def advance(self):
        self.linear = self.linear + self.step
        self._place()

    def valid(self) -> Any:
        return self.linear < self.kernel.total
