"""Owns which tiles of a grouped GEMM a cluster takes: tables of segments in shared memory, and the walk through them.

Knows nothing of loading, multiplying or storing. Sizes are known at run time alone: each CTA reads them once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.shared.grouped_tiles import GroupedTiles


class Tables(NamedTuple):
    """A number for each segment, in shared memory."""

    first: Any
    """Its first row."""
    end: Any
    """The row behind its last."""
    tiles: Any
    """Rows of tiles up to its last one, in one of two halves; the other one is where they are added up."""

    @classmethod
    def of(cls, pool: Any, kernel: GroupedTiles) -> Tables:
        count = kernel.segments
        return cls(pool.alloc((count,), "int32", align=16), pool.alloc((count,), "int32"), pool.alloc((2, count), "int32"))


def doublings(count: int) -> list[int]:
    """Return the powers of two below a count."""
    return [1 << bit for bit in range((count - 1).bit_length())]


@T.inline
def fill_tables(kernel, tables, sizes, thread):
    """Have all threads of a CTA find the segments, and add up their rows of tiles: a scan, in steps of powers of two."""
    threads, count, block_m = meta_vars((kernel.threads, kernel.segments, kernel.tile[0]))
    for i in T.unroll(-(-count // threads)):
        segment = T.meta_var(i * threads + thread)
        if segment < count:
            first, end = T.meta_var(kernel.rows_of(sizes, segment))
            tables.first[segment] = first
            tables.end[segment] = end
            tables.tiles[0, segment] = (end - first + (block_m - 1)) // block_m
    T.cuda.cta_sync()
    steps = T.meta_var(doublings(count))
    for number in T.unroll(len(steps)):
        for i in T.unroll(-(-count // threads)):
            segment = T.meta_var(i * threads + thread)
            if segment < count:
                before = T.meta_var(tables.tiles[number % 2, T.max(segment - T.shift_left(1, number), 0)])
                tables.tiles[1 - number % 2, segment] = tables.tiles[number % 2, segment] + T.Select(
                    segment >= T.shift_left(1, number), before, 0
                )
        T.cuda.cta_sync()


@T.meta_class
class GroupedScheduler:
    """The tiles of a cluster, one after the other."""

    def __init__(self, kernel: GroupedTiles, tables: Tables, first: Any) -> None:
        self.kernel = kernel
        self.tables = tables
        self.half = len(doublings(kernel.segments)) % 2
        self.linear = T.local_scalar("int32")
        self.segment = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.end = T.local_scalar("int32")
        self.column = T.local_scalar("int32")
        self.place = T.local_scalar("int32")
        self.height = T.local_scalar("int32")
        self._start(first)

    @T.inline
    def _start(self, first):
        self.linear = first
        self._place()

    @T.inline
    def _place(self):
        """Find the segment by the number of those that end before the tile, in steps of powers of two."""
        count, columns = meta_vars((self.kernel.segments, self.kernel.columns))
        bits = T.meta_var((count - 1).bit_length())
        strip = T.meta_var(self.linear // columns)
        self.segment = 0
        for bit in T.unroll(bits):
            step = T.meta_var(T.shift_left(1, bits - 1 - bit))
            if self.segment + step < count:
                if self.tables.tiles[self.half, self.segment + step - 1] <= strip:
                    self.segment = self.segment + step
        self.end = T.Select(self.segment > 0, self.tables.tiles[self.half, T.max(self.segment - 1, 0)], 0)
        self.place = self.linear - self.end * columns
        self.height = T.max(self.tables.tiles[self.half, self.segment] - self.end, 1)
        group: T.let = T.min(self.kernel.tile[2], self.height)
        start: T.let = self.place // (group * columns) * group
        last: T.let = T.max(T.min(self.height - start, group), 1)
        at: T.let = self.place % (group * columns)
        self.row = self.tables.first[self.segment] + (start + at % last) * self.kernel.tile[0]
        self.column = at // last
        self.end = self.tables.end[self.segment]

    @T.inline
    def advance(self):
        self.linear = self.linear + self.kernel.clusters
        self._place()

    def valid(self) -> Any:
        return self.linear < self.tables.tiles[self.half, self.kernel.segments - 1] * self.kernel.columns

    def is_of_group(self) -> Any:
        """Say whether the tile's rows belong to a group."""
        return self.segment < self.kernel.spec.groups
