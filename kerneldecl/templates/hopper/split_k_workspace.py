"""Owns split-K through global memory: CTAs keep partial accumulators in a workspace, and a second kernel adds and stores them.

Knows nothing of how accumulators came about.

A cluster has 8 CTAs at most. Where tiles are so few that more of them must share each one, they meet in L2 instead. The second kernel
adds the parts in one order. It is launched with PDL, so that its CTAs are there when the last part is stored.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS, WARPGROUP_THREADS
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.params import GemmParams
from kerneldecl.templates.hopper.split_k import store_total
from kerneldecl.templates.hopper.tile_scheduler import TileScheduler

LOADS_AT_ONCE = 8
"""Parts whose accumulators a thread loads before it adds them."""


class PartialSums:
    """Partial accumulators in global memory: tile, part of k, consumer, store, thread, register. Tiles of a cluster are neighbours."""

    def __init__(self, kernel: GemmKernel) -> None:
        self.kernel = kernel
        self.vector = math.gcd(4, kernel.accum.registers)
        self.stores = kernel.accum.registers // self.vector
        self.tiles = kernel.cluster_tiles * kernel.params.cluster_ctas
        shape = (self.tiles, kernel.params.split_k, kernel.params.consumers, self.stores, WARPGROUP_THREADS, self.vector)
        self.buffer = tirx.decl_buffer(shape, kernel.accum.register_dtype, "partial_sums")

    def allocated_for(self, body: Any) -> Any:
        """Return a function's body with this memory, and with the kernel that adds what it holds."""
        return tirx.SeqStmt([tirx.AllocBuffer(self.buffer), body, _adding(self)])

    def access(self, instruction: str) -> str:
        """Return the PTX by which a thread loads or stores neighbouring registers."""
        vector = f".v{self.vector}" if self.vector > 1 else ""
        return f"{instruction}.global{vector}.{self.kernel.accum.ptx_type}"


@T.inline
def keep_partials(sums, acc, part, consumer, thread):
    """Have a thread store its accumulators; `part` is the tile, and the CTA's part of k."""
    tile, split = meta_vars(part)
    for i in T.unroll(sums.stores):
        T.ptx[sums.access("st")](
            sums.buffer.ptr_to([tile, split, consumer, i, thread, 0]), *[acc[i * sums.vector + v] for v in range(sums.vector)]
        )


@T.inline
def _add(kernel, sums, total, place, thread):
    """Have a thread add up, in one order, the partial accumulators of a tile in all parts of k."""
    accum, parts = T.meta_var((kernel.accum, kernel.params.split_k))
    tile, consumer, i = meta_vars(place)
    received = T.alloc_local((LOADS_AT_ONCE * sums.vector,), accum.register_dtype)
    addends = T.meta_var(accum.of_registers(received))
    count = T.meta_var(sums.vector * accum.per_register)
    for v in T.unroll(count):
        total[v] = tirx.const(0, accum.reduce_dtype)
    for group in T.serial(-(-parts // LOADS_AT_ONCE)):
        for j in T.unroll(LOADS_AT_ONCE):
            if group * LOADS_AT_ONCE + j < parts:
                T.ptx[sums.access("ld")](
                    *[received[j * sums.vector + v] for v in range(sums.vector)],
                    sums.buffer.ptr_to([tile, group * LOADS_AT_ONCE + j, consumer, i, thread, 0]),
                )
        for j in T.unroll(LOADS_AT_ONCE):
            if group * LOADS_AT_ONCE + j < parts:
                for v in T.unroll(count):
                    total[v] = total[v] + T.cast(addends[j * count + v], accum.reduce_dtype)


def _place(origin: TileScheduler, tile: Any, params: GemmParams) -> tuple[Any, Any]:
    """Return the row and the column of a tile, in units of tiles; `origin` is that of its cluster."""
    row, column = origin.row * params.cluster_m, origin.column * params.cluster_n
    if params.cluster_m > 1:
        row += tile % params.cluster_m
    if params.cluster_n > 1:
        column += tile % params.cluster_ctas // params.cluster_m
    return row, column


def _adding(sums: PartialSums) -> Any:
    """Return the kernel that adds partial accumulators: a CTA for each store of a consumer's threads."""
    kernel, params, accum = sums.kernel, sums.kernel.params, sums.kernel.accum
    count = sums.vector * accum.per_register

    @T.prim_func(check_well_formed=False)
    def add():
        T.device_entry()
        T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([sums.tiles * params.consumers * sums.stores])
        warp = T.warp_id([WARPGROUP_THREADS // 32])
        lane = T.lane_id([32])
        T.ptx.griddepcontrol.wait()
        T.ptx.griddepcontrol.launch_dependents()
        i: T.let = block % sums.stores
        consumer: T.let = block // sums.stores % params.consumers
        tile: T.let = block // (sums.stores * params.consumers)
        total = T.alloc_local((count,), accum.reduce_dtype)
        _add(kernel, sums, total, (tile, consumer, i), warp * 32 + lane)
        origin = TileScheduler(kernel, tile // params.cluster_ctas, kernel.clusters)
        row, column = meta_vars(_place(origin, tile, params))
        first_row = T.meta_var(row * params.block_m + consumer * (params.mma_tiles * MMA_TILE_ROWS))
        store_total(kernel, total, i * count, (origin.batch, first_row, column * params.block_n), (warp, lane))

    return add.body
