"""Owns how the parts of a reduction, one for each block of a cluster, are summed in each other's shared memory.

Knows nothing of how sums came about.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import each
from kerneldecl.templates.hopper.params import SLAB, WARPGROUP


@T.inline
def send_sums(kernel, acc, parts, part, thread):
    """Have a thread write its sums to the blocks of its cluster, each of which adds up a share of them."""
    vector = T.meta_var(kernel.sent_at_once)
    count = T.meta_var(kernel.registers // kernel.tiles.split_k)
    for to in T.unroll(kernel.tiles.split_k):
        address = T.alloc_local([1], "uint32")
        T.ptx.mapa.shared__cluster.u32(address[0], T.cuda.cvta_generic_to_shared(parts.ptr_to([part, 0, thread, 0])), T.uint32(to))
        for i in T.unroll(count // vector):
            T.ptx[kernel.send](
                address[0] + T.uint32(i * kernel.tiles.sharers * WARPGROUP * vector * 4),
                *[acc[to * count + i * vector + v] for v in range(vector)],
            )


@T.inline
def finish_sums(kernel, parts, part, thread, at, lanes):
    """Have a thread add up, in one order, what all blocks of its cluster sent it, and store the results."""
    results = T.meta_var(kernel.results)
    batch, row, column = each(at)
    warp, lane = each(lanes)
    vector = T.meta_var(kernel.sent_at_once * kernel.packing)
    count = T.meta_var(kernel.tiles.sums // kernel.tiles.split_k)
    per_slab = T.meta_var(kernel.tiles.block_n // 2)
    received = T.alloc_local([kernel.sent_at_once], kernel.registers_dtype)
    sums = T.meta_var(kernel.as_sums(received))
    total = T.alloc_local([vector], kernel.total_dtype)
    for i in T.unroll(count // vector):
        for other in T.unroll(kernel.tiles.split_k):
            for v in T.vectorized(kernel.sent_at_once):
                received[v] = parts[other, i, thread, v]
            for v in T.unroll(vector):
                if other == 0:
                    total[v] = T.cast(sums[v], kernel.total_dtype)
                else:
                    total[v] = total[v] + T.cast(sums[v], kernel.total_dtype)
        place = T.meta_var(part * count + i * vector)
        for v in T.unroll(vector):
            element = T.meta_var(place + v)
            x = T.meta_var(row + element // per_slab * SLAB + warp * 16 + element % 4 // 2 * 8 + lane // 4)
            y = T.meta_var(column + element % per_slab // 4 * 8 + (lane % 4) * 2 + element % 2)
            if results.inside(x, y):
                results.buffer[tuple(results.index(batch, x, y))] = results.element(T.cast(total[v], kernel.accum_dtype), batch, x, y)
