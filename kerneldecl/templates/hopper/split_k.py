"""Owns split-K in a cluster: its CTAs send partial accumulators to each other's shared memory, and each one reduces a share of them.

Knows nothing of how accumulators came about.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS, WARPGROUP_THREADS
from kerneldecl.templates.hopper.epilogue import meta_vars


@T.inline
def _store_share(kernel, acc, to, address, instruction, barrier):
    """Have a thread store its accumulators of one CTA's share; `barrier` counts the bytes, in a tuple that is empty where none does."""
    vector = T.meta_var(kernel.registers_per_store)
    count = T.meta_var(kernel.split_k_share)
    for i in T.unroll(count // vector):
        if kernel.has_register(to * count + i * vector):
            T.ptx[instruction](
                address + T.uint32(i * kernel.params.consumers_per_tile * WARPGROUP_THREADS * vector * 4),
                *[acc[to * count + i * vector + v] for v in range(vector)],
                *barrier,
            )


@T.inline
def _send_share(kernel, acc, smem, to, sender):
    """Have a thread send accumulators to the CTA whose share they are; a barrier there counts bytes. `sender` is a rank and a thread."""
    rank, thread = meta_vars(sender)
    address = T.alloc_local([2], "uint32")
    own, barrier = T.meta_var((smem.partials.ptr_to([rank, 0, thread, 0]), smem.received.ptr_to([0])))
    T.ptx.mapa.shared__cluster.u32(address[0], T.cuda.cvta_generic_to_shared(own), T.uint32(to))
    T.ptx.mapa.shared__cluster.u32(address[1], T.cuda.cvta_generic_to_shared(barrier), T.uint32(to))
    store = T.meta_var(kernel.share_store("st_async.shared::cluster.mbarrier::complete_tx::bytes"))
    _store_share(kernel, acc, to, address[0], store, (address[1],))


@T.inline
def _keep_share(kernel, acc, partials, rank, thread):
    """Have a thread store the accumulators of its own CTA's share beside those that it receives."""
    own = T.meta_var(T.cuda.cvta_generic_to_shared(partials.ptr_to([rank, 0, thread, 0])))
    for to in T.unroll(kernel.params.split_k):
        if rank == to:
            _store_share(kernel, acc, to, own, kernel.share_store("st.shared"), ())


@T.inline
def expect_partials(kernel, received, rank):
    """Have one thread arrive at the barrier of what the other CTAs send to this one, and say how many bytes that is."""
    share = T.meta_var(kernel.split_k_share)
    registers = T.meta_var(T.min(share, kernel.accum.registers - rank * share))
    threads = T.meta_var(kernel.params.consumers_per_tile * WARPGROUP_THREADS)
    received.arrive(0, T.max(registers, 0) * ((kernel.params.split_k - 1) * threads * 4))


@T.inline
def send_partials(kernel, acc, smem, rank, thread):
    """Have a thread send its accumulators to the CTAs of its cluster, each of which reduces a share of them.

    It begins with the CTA after its own, so that all of them receive at once: what several send to one waits for each other.
    """
    parts = T.meta_var(kernel.params.split_k)
    for step in T.unroll(parts - 1):
        for to in T.unroll(parts):
            if rank == (to + parts - 1 - step) % parts:
                _send_share(kernel, acc, smem, to, (rank, thread))
    _keep_share(kernel, acc, smem.partials, rank, thread)


@T.inline
def store_total(kernel, total, place, at, lanes, is_whole=False):
    """Have a thread store the results of neighbouring accumulators, of which `place` is the first; of a whole tile all are results."""
    epilogue, accum = T.meta_var((kernel.epilogue, kernel.accum))
    batch, row, column = meta_vars(at)
    warp, lane = meta_vars(lanes)
    # Neighbours in a line are stored at once: L2 takes a part of a sector in no less time than more of it.
    in_pairs = T.meta_var(epilogue.via_smem and epilogue.in_pairs and not epilogue.is_swapped and int(total.shape[0]) % 2 == 0)
    size = T.meta_var(2 if in_pairs else 1)
    packed = T.meta_var(T.alloc_local([1], "uint32") if in_pairs else None)
    for v in T.unroll(int(total.shape[0]) // size):
        element = T.meta_var(place + v * size)
        x = T.meta_var(row + element // accum.per_mma_tile * MMA_TILE_ROWS + warp * 16 + element % 4 // 2 * 8 + lane // 4)
        y = T.meta_var(column + element % accum.per_mma_tile // 4 * 8 + (lane % 4) * 2 + element % 2)
        if is_whole or epilogue.inside(x, y):
            if in_pairs:
                # Not by vectors of TIR: TVM's code would keep one that it has converted although its elements have changed.
                T.ptx[f"cvt.rn.{'bf16' if epilogue.dtype == 'bfloat16' else 'f16'}x2.f32"](
                    packed[0],
                    epilogue.value_float32(T.cast(total[v * 2 + 1], accum.dtype), (batch, x, y + 1), epilogue.aux(batch, x, y + 1)),
                    epilogue.value_float32(T.cast(total[v * 2], accum.dtype), (batch, x, y), epilogue.aux(batch, x, y)),
                )
                T.ptx["st.global.u32"](epilogue.buffer.ptr_to(epilogue.index(batch, x, y)), packed[0])
            else:
                epilogue.buffer[tuple(epilogue.index(batch, x, y))] = epilogue.element(T.cast(total[v], accum.dtype), batch, x, y)


@T.inline
def _reduce(kernel, partials, ranks, at, lanes, is_whole):
    rank, thread = meta_vars(ranks)
    accum = T.meta_var(kernel.accum)
    vector = T.meta_var(kernel.registers_per_store * accum.per_register)
    count = T.meta_var(kernel.split_k_share * accum.per_register)
    received = T.alloc_local([kernel.registers_per_store], accum.register_dtype)
    addends = T.meta_var(accum.of_registers(received))
    total = T.alloc_local([vector], accum.reduce_dtype)
    for i in T.unroll(count // vector):
        place = T.meta_var(rank * count + i * vector)
        if kernel.has_register(rank * kernel.split_k_share + i * kernel.registers_per_store):
            for other in T.unroll(kernel.params.split_k):
                for v in T.vectorized(kernel.registers_per_store):
                    received[v] = partials[other, i, thread, v]
                for v in T.unroll(vector):
                    if other == 0:
                        total[v] = T.cast(addends[v], accum.reduce_dtype)
                    else:
                        total[v] = total[v] + T.cast(addends[v], accum.reduce_dtype)
            store_total(kernel, total, place, at, lanes, is_whole)


@T.inline
def reduce_partials(kernel, partials, rank, thread, at, lanes):
    """Have a thread add up, in one order, what all CTAs of its cluster sent it, and store the results.

    Where last rows fill no tile, each tile is looked at as a whole first: with any number of rows every result has a branch of its own.
    """
    _, row, column = meta_vars(at)
    last = T.meta_var((row + kernel.params.mma_tiles * MMA_TILE_ROWS - 1, column + kernel.params.block_n - 1))
    if kernel.a.has_tail or kernel.b.has_tail:
        if kernel.epilogue.inside(*last):
            _reduce(kernel, partials, (rank, thread), at, lanes, True)
        else:
            _reduce(kernel, partials, (rank, thread), at, lanes, False)
    else:
        _reduce(kernel, partials, (rank, thread), at, lanes, False)
