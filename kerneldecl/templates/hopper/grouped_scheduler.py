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
    """Rows of tiles up to its last one, in the second of two halves; they are added up in both by turns."""
    apart: int
    """Numbers from one half to the other."""

    @classmethod
    def of(cls, pool: Any, kernel: GroupedTiles, scratch: int | None = None) -> Tables:
        """Allocate tables; `scratch` is where the first half may be, in bytes of the pool, if that is used for something else later."""
        count = kernel.segments
        first, end = pool.alloc((count,), "int32", align=16), pool.alloc((count,), "int32")
        if scratch is None:
            return cls(first, end, pool.alloc((2 * count,), "int32"), count)
        apart = (pool.offset - scratch) // 4
        pool.move_base_to(scratch)
        return cls(first, end, pool.alloc((apart + count,), "int32"), apart)

    def up_to(self, segment: Any) -> Any:
        """Return the rows of tiles up to a segment's last one, once they are added up."""
        return self.tiles[self.apart + segment]


def doublings(count: int) -> list[int]:
    """Return the powers of two below a count."""
    return [1 << bit for bit in range((count - 1).bit_length())]


@T.inline
def fill_tables(kernel, tables, sizes, thread):
    """Have all threads of a CTA find the segments, and add up their rows of tiles: a scan, in steps of powers of two."""
    threads, count, block_m, apart = meta_vars((kernel.threads, kernel.segments, kernel.tile[0], tables.apart))
    steps = T.meta_var(doublings(count))
    begin = T.meta_var((len(steps) + 1) % 2)
    for i in T.unroll(-(-count // threads)):
        segment = T.meta_var(i * threads + thread)
        if segment < count:
            first, end = T.meta_var(kernel.rows_of(sizes, segment))
            tables.first[segment] = first
            tables.end[segment] = end
            tables.tiles[begin * apart + segment] = (end - first + (block_m - 1)) // block_m
    T.cuda.cta_sync()
    for number in T.unroll(len(steps)):
        for i in T.unroll(-(-count // threads)):
            segment = T.meta_var(i * threads + thread)
            if segment < count:
                half = T.meta_var((begin + number) % 2 * apart)
                before = T.meta_var(tables.tiles[half + T.max(segment - T.shift_left(1, number), 0)])
                tables.tiles[apart - half + segment] = tables.tiles[half + segment] + T.Select(
                    segment >= T.shift_left(1, number), before, 0
                )
        T.cuda.cta_sync()


@T.meta_class
class GroupedScheduler:
    """The tiles of a cluster, one after the other; of consumers that take turns, each has every second one."""

    def __init__(self, kernel: GroupedTiles, tables: Tables, first: Any, turns: int = 1) -> None:
        self.kernel = kernel
        self.tables = tables
        self.step = turns * kernel.clusters
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
                if self.tables.up_to(self.segment + step - 1) <= strip:
                    self.segment = self.segment + step
        self.end = T.Select(self.segment > 0, self.tables.up_to(T.max(self.segment - 1, 0)), 0)
        self.place = self.linear - self.end * columns
        self.height = T.max(self.tables.up_to(self.segment) - self.end, 1)
        group: T.let = T.min(self.kernel.tile[2], self.height)
        start: T.let = self.place // (group * columns) * group
        last: T.let = T.max(T.min(self.height - start, group), 1)
        at: T.let = self.place % (group * columns)
        self.row = self.tables.first[self.segment] + (start + at % last) * self.kernel.tile[0]
        self.column = at // last
        self.end = self.tables.end[self.segment]

    @T.inline
    def advance(self):
        self.linear = self.linear + self.step
        self._place()

    def valid(self) -> Any:
        return self.linear < self.tables.up_to(self.kernel.segments - 1) * self.kernel.columns

    def is_of_group(self) -> Any:
        """Say whether the tile's rows belong to a group."""
        return self.segment < self.kernel.spec.groups
