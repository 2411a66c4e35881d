"""Owns the tile scheduler of a GEMM kernel: which tiles a cluster takes one after the other, and which of their k-tiles.

Knows nothing of loading, multiplying or storing.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.kernel_config import GemmKernel


@T.meta_class
class TileScheduler:
    """The tiles of a cluster, one after the other: batch, row and column in units of clusters' tiles.

    With stream-K the cluster's parts of stream-K tiles follow its data-parallel tiles.
    """

    def __init__(self, kernel: GemmKernel, first: Any, step: int) -> None:
        self.kernel = kernel
        self.step = step
        self.linear = T.local_scalar("int32")
        self.batch = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.column = T.local_scalar("int32")
        if self._has_stream_k:
            self.iteration = T.local_scalar("int32")
            self.end = T.local_scalar("int32")
        self._start(first)

    @property
    def _has_stream_k(self) -> bool:
        return self.kernel.params.stream_k > 0

    @T.inline
    def _start(self, first):
        self.linear = first
        if self._has_stream_k:
            self.iteration = (self.kernel.clusters - 1 - first) * self.kernel.cluster_iterations
            self.end = T.min(self.iteration + self.kernel.cluster_iterations, self.kernel.stream_k_iterations)
            if self.linear >= self.kernel.data_parallel_tiles:
                self.linear = self.kernel.data_parallel_tiles + self.iteration // self.kernel.k_tiles
        self._place()

    @T.inline
    def _place(self):
        rows, columns = meta_vars(self.kernel.cluster_grid)
        group = T.meta_var(min(self.kernel.params.raster_group, rows))
        place = T.meta_var(self.linear % (rows * columns) if self.kernel.grid[0] > 1 else self.linear)
        start = T.meta_var(place // (group * columns) * group)
        height = T.meta_var(group if rows % group == 0 else T.min(rows - start, group))
        self.batch = self.linear // (rows * columns) if self.kernel.grid[0] > 1 else 0
        self.row = start + place % (group * columns) % height
        self.column = place % (group * columns) // height

    @T.inline
    def advance(self):
        if self._has_stream_k:
            if self.linear < self.kernel.data_parallel_tiles:
                self.linear = self.linear + self.step
            else:
                self.iteration = self.iteration + self.k_tile_count()
            if self.linear >= self.kernel.data_parallel_tiles:
                self.linear = self.kernel.data_parallel_tiles + self.iteration // self.kernel.k_tiles
        else:
            self.linear = self.linear + self.step
        self._place()

    def valid(self) -> Any:
        if self._has_stream_k:
            return T.Or(self.linear < self.kernel.data_parallel_tiles, self.iteration < self.end)
        return self.linear < self.kernel.cluster_tiles

    def first_k_tile(self) -> Any:
        """Return the first k-tile of the cluster's part of the tile."""
        if self._has_stream_k:
            return T.Select(self.linear < self.kernel.data_parallel_tiles, 0, self.iteration % self.kernel.k_tiles)
        return 0

    def k_tile_count(self) -> Any:
        """Return how many k-tiles the cluster's part of the tile has."""
        if not self._has_stream_k:
            return self.kernel.k_tiles_per_cta
        k_tiles = self.kernel.k_tiles
        part = T.min(k_tiles - self.iteration % k_tiles, self.end - self.iteration)
        return T.Select(self.linear < self.kernel.data_parallel_tiles, k_tiles, part)

    def is_finished_by_another(self) -> Any:
        """Say whether another cluster has the tile's first k-tiles, and is to add this one's accumulators to its own."""
        return self.first_k_tile() > 0

    def peers(self) -> Any:
        """Return how many other clusters have a part of the tile whose first k-tiles this one has."""
        share = self.kernel.cluster_iterations
        others = (self.iteration + self.kernel.k_tiles - 1) // share - self.iteration // share
        return T.Select(self.linear < self.kernel.data_parallel_tiles, 0, others)

    def peer(self, number: Any) -> Any:
        """Return the cluster that has a part of the tile, counted from the next one after this cluster's."""
        return self.kernel.clusters - 2 - self.iteration // self.kernel.cluster_iterations - number
