"""Owns how a kernel on wgmma walks over tiles, and what it sees of sums and of staging buffers on its way.

Knows nothing of loading, multiplying or storing.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import each
from kerneldecl.templates.hopper.kernel_config import Kernel


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
    """The tiles of a cluster, one after the other: batch, row and column in units of clusters' tiles.

    Where the last waves are dealt evenly, what follows the whole tiles are the pieces of the cluster's share.
    """

    def __init__(self, kernel: Kernel, first: Any, step: int) -> None:
        self.kernel = kernel
        self.step = step
        self.linear = T.local_scalar("int32")
        self.batch = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.column = T.local_scalar("int32")
        if self._is_stream:
            self.at = T.local_scalar("int32")
            self.end = T.local_scalar("int32")
        self._start(first)

    @property
    def _is_stream(self) -> bool:
        return self.kernel.tiles.stream_k > 0

    @T.inline
    def _start(self, first):
        self.linear = first
        if self._is_stream:
            self.at = (self.kernel.clusters - 1 - first) * self.kernel.share
            self.end = T.min(self.at + self.kernel.share, self.kernel.shared_steps)
            if self.linear >= self.kernel.whole:
                self.linear = self.kernel.whole + self.at // self.kernel.steps
        self._place()

    @T.inline
    def _place(self):
        rows, columns = each(self.kernel.blocks)
        group = T.meta_var(min(self.kernel.tiles.raster_group, rows))
        place = T.meta_var(self.linear % (rows * columns) if self.kernel.grid[0] > 1 else self.linear)
        start = T.meta_var(place // (group * columns) * group)
        height = T.meta_var(group if rows % group == 0 else T.min(rows - start, group))
        self.batch = self.linear // (rows * columns) if self.kernel.grid[0] > 1 else 0
        self.row = start + place % (group * columns) % height
        self.column = place % (group * columns) // height

    @T.inline
    def advance(self):
        if self._is_stream:
            if self.linear < self.kernel.whole:
                self.linear = self.linear + self.step
            else:
                self.at = self.at + self.count()
            if self.linear >= self.kernel.whole:
                self.linear = self.kernel.whole + self.at // self.kernel.steps
        else:
            self.linear = self.linear + self.step
        self._place()

    def valid(self) -> Any:
        if self._is_stream:
            return T.Or(self.linear < self.kernel.whole, self.at < self.end)
        return self.linear < self.kernel.total

    def begin(self) -> Any:
        """Return the first step of the tile's piece."""
        if self._is_stream:
            return T.Select(self.linear < self.kernel.whole, 0, self.at % self.kernel.steps)
        return 0

    def count(self) -> Any:
        """Return how many steps the piece has."""
        if not self._is_stream:
            return self.kernel.part_steps
        steps = self.kernel.steps
        return T.Select(self.linear < self.kernel.whole, steps, T.min(steps - self.at % steps, self.end - self.at))

    def is_begun_by_another(self) -> Any:
        """Say whether another cluster began the tile, and is to finish it."""
        return self.begin() > 0

    def sharers(self) -> Any:
        """Return how many other clusters have a piece of the tile that this one began."""
        share = self.kernel.share
        others = (self.at + self.kernel.steps - 1) // share - self.at // share
        return T.Select(self.linear < self.kernel.whole, 0, others)

    def sharer(self, number: Any) -> Any:
        """Return the cluster that has a piece of the tile, counted from the next one after this cluster's."""
        return self.kernel.clusters - 2 - self.at // self.kernel.share - number
