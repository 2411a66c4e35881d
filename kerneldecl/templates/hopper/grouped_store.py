"""Owns how a consumer stores its rows of a grouped GEMM's tile: by TMA where all rows of a chunk are the segment's, else row by row.

Knows nothing of products. A chunk is 64 rows of 64 columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS, WARPGROUP_THREADS
from kerneldecl.templates.hopper.copy_out import copy_out
from kerneldecl.templates.hopper.epilogue import Epilogue, meta_vars
from kerneldecl.templates.hopper.store import TMA_STORE, Accumulators, StagingChunk, _fill

ZEROS = 8
"""Elements of 16 bits that a thread sets to zero at once."""


def bounded(epilogue: Epilogue, end: Any) -> Epilogue:
    """Return the epilogue of rows before an end."""
    return replace(epilogue, inside=lambda row, column: T.And(row < end, epilogue.inside(row, column)))


@T.inline
def store_rows(context, at, end):
    """Have a warpgroup store its accumulators; `at` is the first row, the first column and the consumer, `end` the segment's.

    Each chunk commits a group of stores, if only an empty one, also where none of its rows is the segment's: waits count groups.
    """
    row, column, consumer = meta_vars(at)
    plan, staging = T.meta_var((context.plan, context.staging))
    epilogue, acc = T.meta_var((bounded(context.epilogue, end), Accumulators(context.plan.accum, context.acc, 0)))
    is_first = T.meta_var((context.lanes[0] == 0) & (context.lanes[1] == 0))
    for chunk in T.unroll(plan.chunks):
        buffer = T.meta_var(chunk % plan.buffers)
        x, y = meta_vars(context.corner(chunk, row, column))
        if x < end:
            if is_first:
                T.ptx.cp.async_.bulk.wait_group.read(plan.buffers - 1)
            T.cuda.warpgroup_sync(1 + consumer)
            _fill(context, acc, StagingChunk(staging, consumer, buffer), chunk, (0, x, y))
            if x + MMA_TILE_ROWS <= end:
                T.ptx.fence.proxy.async_.shared__cta()
                T.cuda.warpgroup_sync(1 + consumer)
                if is_first:
                    T.ptx[TMA_STORE.format(2)](T.address_of(context.map), *epilogue.coords(0, x, y), staging.ptr_to([consumer, buffer, 0]))
            else:
                T.cuda.warpgroup_sync(1 + consumer)
                copy_out(epilogue, StagingChunk(staging, consumer, buffer), (0, x, y), context.lanes)
        if is_first:
            T.ptx.cp.async_.bulk.commit_group()


@T.inline
def store_zeros(kernel, out, at, end):
    """Have a warpgroup set its rows of a tile to zero; `at` is the first row, the first column and the thread of the warpgroup."""
    row, column, thread = meta_vars(at)
    rows, columns = meta_vars((kernel.gemm.params.mma_tiles * MMA_TILE_ROWS, kernel.params.block_n))
    for i in T.serial(rows * columns // ZEROS // WARPGROUP_THREADS):
        place = T.meta_var(i * WARPGROUP_THREADS + thread)
        x, y = meta_vars((row + place // (columns // ZEROS), column + place % (columns // ZEROS) * ZEROS))
        if T.And(x < end, y < kernel.spec.n):
            for v in T.vectorized(ZEROS):
                out[x * kernel.spec.n + y + v] = T.cast(T.float32(0), kernel.spec.out_dtype)
