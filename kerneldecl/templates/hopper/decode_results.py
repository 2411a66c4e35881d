"""Owns what happens to the rows of a kernel of attention against a KV cache on wgmma before and after: queries come, results leave.

Knows nothing of products. Results go through the place of queries, or as float32 to the workspace of the kernel that combines parts.
"""

from __future__ import annotations

from tvm.script import tirx as T

from kerneldecl.analysis.attention import CHUNK
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS, WARPGROUP_THREADS
from kerneldecl.analysis.wgmma_decode import CONSUMERS
from kerneldecl.compiler.intrinsics.int4_dot import cp_async_source
from kerneldecl.templates.hopper.attention_softmax import add_threads, invert_sums
from kerneldecl.templates.hopper.decode_config import CHUNK_ELEMENTS
from kerneldecl.templates.hopper.decode_consumer import CONSUMER_BARRIER, CONSUMERS_BARRIER, VECTOR
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.store import STMATRIX


@T.inline
def _meet():
    T.ptx.bar.sync(T.uint32(CONSUMERS_BARRIER), T.uint32(CONSUMERS * WARPGROUP_THREADS))


@T.inline
def load_queries(consumer, q):
    """Have both consumers copy the CTA's rows of queries to shared memory: zeros for rows and columns that are not there."""
    kernel, span = meta_vars((consumer.kernel, consumer.span))
    batch, head, first = meta_vars(span.place)
    columns, per_row = meta_vars((kernel.spec.head_dim, kernel.qk_chunks * VECTOR))
    name, source = T.meta_var(cp_async_source(VECTOR * 2))
    for i in T.unroll(MMA_TILE_ROWS * per_row // (CONSUMERS * WARPGROUP_THREADS)):
        at = T.meta_var((i * CONSUMERS + consumer.parity) * WARPGROUP_THREADS + consumer.thread)
        row, vector = meta_vars((at // per_row, at % per_row))
        is_there = T.meta_var(T.And(first + row < kernel.group_rows, vector * VECTOR < columns))
        of = T.meta_var(kernel.query_offset(batch, head, T.min(first + row, kernel.group_rows - 1), columns))
        piece = T.meta_var(T.bitwise_xor(vector % VECTOR, row % VECTOR))
        T.cuda.func_call(
            name,
            consumer.smem.q.ptr_to([vector // VECTOR * CHUNK_ELEMENTS + row * CHUNK + piece * VECTOR]),
            q.ptr_to([of + T.min(vector * VECTOR, columns - VECTOR)]),
            T.Select(is_there, VECTOR * 2, 0),
            source_code=source,
        )
    T.ptx.cp.async_.commit_group()
    T.ptx.cp.async_.wait_group(0)
    T.ptx.fence.proxy.async_.shared__cta()
    _meet()


@T.inline
def add_consumers(consumer):
    """Add up the sums of rows over both consumers, whose references are the same, and note their inverse."""
    softmax, totals = meta_vars((consumer.softmax, consumer.smem.totals))
    add_threads(softmax)
    for r in T.unroll(2):
        if consumer.ids[1] % 4 == 0:
            totals[consumer.parity, consumer.row(r)] = softmax.total[r * 2]
    # Also, both have multiplied the queries in whose place results come.
    _meet()
    for r in T.unroll(2):
        softmax.total[r * 2] = totals[0, consumer.row(r)] + totals[1, consumer.row(r)]
    invert_sums(softmax)


@T.inline
def store_results(consumer, o):
    """Store a consumer's columns of results, rounded: by way of shared memory, so that neighbouring threads store neighbouring elements."""
    kernel, smem, results = meta_vars((consumer.kernel, consumer.smem, consumer.results))
    softmax, span = meta_vars((consumer.softmax, consumer.span))
    warp, lane = meta_vars(consumer.ids)
    batch, head, first = meta_vars(span.place)
    half = T.meta_var(kernel.spec.value_dim // CONSUMERS)
    packed = T.alloc_local((4,), "uint32")
    for block in T.unroll(half // 16):
        for q in T.unroll(4):
            i = T.meta_var(block * 8 + q * 2)
            T.ptx[kernel.narrow](packed[q], results[i + 1] * softmax.factor[q % 2], results[i] * softmax.factor[q % 2])
        chunk = T.meta_var(consumer.parity * kernel.half_chunks + block // 4)
        piece = T.meta_var(T.bitwise_xor(block % 4 * 2 + lane // 16, lane % 8))
        T.ptx[STMATRIX.format(4, "")](
            smem.q.ptr_to([chunk * CHUNK_ELEMENTS + (warp * 16 + lane % 16) * CHUNK + piece * VECTOR]), *[packed[q] for q in range(4)]
        )
    T.cuda.warpgroup_sync(CONSUMER_BARRIER + consumer.parity)
    for i in T.unroll(MMA_TILE_ROWS * half // VECTOR // WARPGROUP_THREADS):
        at = T.meta_var(i * WARPGROUP_THREADS + consumer.thread)
        row, vector = meta_vars((at // (half // VECTOR), at % (half // VECTOR)))
        chunk = T.meta_var(consumer.parity * kernel.half_chunks + vector // VECTOR)
        piece = T.meta_var(T.bitwise_xor(vector % VECTOR, row % VECTOR))
        if first + row < kernel.group_rows:
            of = T.meta_var(kernel.query_offset(batch, head, first + row, kernel.spec.value_dim))
            for x in T.vectorized(VECTOR):
                o[of + consumer.parity * half + vector * VECTOR + x] = smem.q[chunk * CHUNK_ELEMENTS + row * CHUNK + piece * VECTOR + x]


@T.inline
def store_parts(consumer, workspace, unit, part):
    """Store a consumer's columns of results, and the references and sums of rows, for the kernel that combines parts."""
    kernel, softmax = meta_vars((consumer.kernel, consumer.softmax))
    first, half = meta_vars((consumer.span.place[2], kernel.spec.value_dim // CONSUMERS))
    lane = T.meta_var(consumer.ids[1])
    for r in T.unroll(2):
        if first + consumer.row(r) < kernel.group_rows:
            for block in T.unroll(half // 8):
                column = T.meta_var(consumer.parity * half + block * 8 + lane % 4 * 2)
                for x in T.vectorized(2):
                    workspace.results[unit, part, consumer.row(r), column + x] = consumer.results[block * 4 + r * 2 + x]
            if T.And(lane % 4 == 0, consumer.parity == 0):
                workspace.stats[unit, part, consumer.row(r), 0] = softmax.reference[r]
                workspace.stats[unit, part, consumer.row(r), 1] = softmax.total[r * 2]
