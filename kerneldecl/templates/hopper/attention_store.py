"""Owns how a consumer of an attention kernel stores its results: through the place of its queries, by TMA.

Knows nothing of how they come about.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kerneldecl.analysis.attention import CHUNK
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.store import STMATRIX, TMA_STORE

CONSUMER_BARRIER = 1
"""First of the named barriers at which a consumer's warps meet."""


@T.inline
def give_back_queries(consumer, stage):
    """Have the thread that stores results give their place, a stage of queries, back to the producer once they have been read there."""
    place = T.meta_var(stage * consumer.kernel.params.consumers + consumer.index)
    if (consumer.lanes[0] == 0) & (consumer.lanes[1] == 0):
        T.ptx.cp.async_.bulk.wait_group.read(0)
        consumer.smem.q_empty.arrive(place)


@T.inline
def store_results(consumer, store_map, tile):
    """Have a consumer store its results: rounded to the place of its queries, and from there by TMA, which drops rows beyond the last."""
    kernel, smem = T.meta_var((consumer.kernel, consumer.smem))
    warp, lane = meta_vars(consumer.lanes)
    q_state = T.meta_var(consumer.states[0])
    place = T.meta_var(q_state.stage * kernel.params.consumers + consumer.index)
    results, softmax = T.meta_var((consumer.results, consumer.softmax))
    row = T.meta_var(tile.row + consumer.index * MMA_TILE_ROWS)
    packed = T.alloc_local((4,), "uint32")
    # All warps have multiplied their last scores from there.
    T.cuda.warpgroup_sync(CONSUMER_BARRIER + consumer.index)
    for block in T.unroll(kernel.stored_blocks):
        for q in T.unroll(4):
            i = T.meta_var(block * 8 + q * 2)
            if i < kernel.results:
                T.ptx[kernel.narrow](packed[q], results[i + 1] * softmax.factor[q % 2], results[i] * softmax.factor[q % 2])
            else:
                packed[q] = T.uint32(0)
        line = T.meta_var(warp * 16 + lane % 16)
        piece = T.meta_var(T.bitwise_xor(block % 4 * 2 + lane // 16, lane % 8))
        T.ptx[STMATRIX.format(4, "")](
            smem.q.ptr_to([place, block // 4 * (MMA_TILE_ROWS * CHUNK) + line * CHUNK + piece * 8]), *[packed[q] for q in range(4)]
        )
    T.ptx.fence.proxy.async_.shared__cta()
    T.cuda.warpgroup_sync(CONSUMER_BARRIER + consumer.index)
    if (warp == 0) & (lane == 0):
        for chunk in T.unroll(kernel.o_chunks):
            T.ptx[TMA_STORE.format(4)](
                T.address_of(store_map),
                chunk * CHUNK,
                row,
                tile.head,
                tile.batch,
                smem.q.ptr_to([place, chunk * (MMA_TILE_ROWS * CHUNK)]),
            )
        T.ptx.cp.async_.bulk.commit_group()
    if kernel.params.q_stages == 1:
        give_back_queries(consumer, q_state.stage)
    q_state.advance()
