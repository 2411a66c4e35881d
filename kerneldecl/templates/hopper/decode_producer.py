"""Owns the shared memory of a kernel of attention against a KV cache on wgmma, and the producer thread that loads blocks of keys.

Knows nothing of consumers but that they give stages back, in two parts: each consumer what it reads last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.backend.cuda.lang.pipeline import PipelineState
from tvm.script import tirx as T

from kerneldecl.analysis.attention import CHUNK
from kerneldecl.analysis.wgmma_decode import BLOCK_KEYS, CHUNK_BYTES, CONSUMERS
from kerneldecl.templates.hopper.decode_config import CHUNK_ELEMENTS, WgmmaDecodeKernel
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.tma import LOAD, MULTICAST


class Smem(NamedTuple):
    """Shared memory of a CTA, and its barriers."""

    q: Any
    kv: Any
    """Stages: two for each pair of blocks of keys."""
    references: Any
    """By consumer and row: what was subtracted from the scores of its last block."""
    totals: Any
    """By consumer and row: sums of powers."""
    full: Any
    """One for each chunk of each stage."""
    empty: Any
    """Two for each stage: what consumer 0 reads last, and consumer 1."""


class Span(NamedTuple):
    """What a CTA computes."""

    place: tuple[Any, Any, Any]
    """Sequence, head of keys, first row of queries."""
    rank: Any
    """Rank of the CTA in its cluster."""
    length: Any
    """Keys of the sequence."""
    begin: Any
    """First of its pairs of blocks."""
    end: Any


def _rows_of(kernel: WgmmaDecodeKernel, span: Span, block: Any, first: Any, page: Any) -> tuple[Any, Any]:
    """Return where the rows of a box that begins so many keys into a block lie: row, and sequence or page.

    A block that has no key is beyond the tensor, so that zeros come; so are pages without a key.
    """
    key = block * BLOCK_KEYS + first
    if kernel.spec.page_size:
        return key % kernel.spec.page_size, page
    return T.Select(block * BLOCK_KEYS < span.length, key, kernel.spec.keys), span.place[0]


@T.inline
def _load_chunk(kernel, smem, tensor_map, at, pages):
    """Have one thread load its CTA's boxes of a chunk; `at` is its column, its place in shared memory, and the block."""
    column, (stage, chunk), (block, parity, span) = meta_vars(at)
    head = T.meta_var(span.place[1])
    barrier = T.meta_var(smem.full.ptr_to([stage * kernel.stage_chunks + chunk]))
    smem.full.arrive(stage * kernel.stage_chunks + chunk, CHUNK_BYTES)
    for box in T.unroll(kernel.boxes):
        first = T.meta_var(span.rank * kernel.rows_per_cta + box * kernel.box_rows)
        place = T.meta_var(smem.kv.ptr_to([stage, chunk * CHUNK_ELEMENTS + first * CHUNK]))
        row, outer = T.meta_var(_rows_of(kernel, span, block, first, pages[parity * kernel.boxes + box]))
        if kernel.params.cluster == 1:
            T.ptx[LOAD.format(4, "")](place, T.address_of(tensor_map), column, row, head, outer, barrier)
        else:
            everyone = T.meta_var(T.uint16((1 << kernel.params.cluster) - 1))
            T.ptx[LOAD.format(4, MULTICAST)](place, T.address_of(tensor_map), column, row, head, outer, barrier, everyone)


@T.inline
def _find_pages(kernel, table, span, pair, pages):
    """Load the numbers of the pages of a pair's boxes; those without a key have one beyond the last."""
    spec = T.meta_var(kernel.spec)
    for parity in T.unroll(CONSUMERS):
        for box in T.unroll(kernel.boxes):
            first = T.meta_var(span.rank * kernel.rows_per_cta + box * kernel.box_rows)
            key = T.meta_var((pair * CONSUMERS + parity) * BLOCK_KEYS + first)
            pages[parity * kernel.boxes + box] = spec.pages
            if key < span.length:
                pages[parity * kernel.boxes + box] = table[span.place[0] * spec.table_columns + key // spec.page_size]


@T.inline
def _load_block(kernel, smem, maps, at, pages):
    """Have one thread load a block, a chunk after another, as consumers give back what was there."""
    state, parity, pair, span = meta_vars(at)
    k_map, v_map = meta_vars(maps)
    stage = T.meta_var(state.stage * CONSUMERS + parity)
    block = T.meta_var((pair * CONSUMERS + parity, parity, span))
    smem.empty.wait(stage * CONSUMERS, state.phase)
    if kernel.spec.is_latent:
        for chunk in T.unroll(kernel.half_chunks):
            _load_chunk(kernel, smem, k_map, (chunk * CHUNK, (stage, chunk), block), pages)
        smem.empty.wait(stage * CONSUMERS + 1, state.phase)
        for rest in T.unroll(kernel.qk_chunks - kernel.half_chunks):
            chunk = T.meta_var(kernel.half_chunks + rest)
            _load_chunk(kernel, smem, k_map, (chunk * CHUNK, (stage, chunk), block), pages)
    else:
        smem.empty.wait(stage * CONSUMERS + 1, state.phase)
        for chunk in T.unroll(kernel.qk_chunks):
            _load_chunk(kernel, smem, k_map, (chunk * CHUNK, (stage, chunk), block), pages)
        for chunk in T.unroll(kernel.v_chunks):
            _load_chunk(kernel, smem, v_map, (chunk * CHUNK, (stage, kernel.qk_chunks + chunk), block), pages)


@T.inline
def produce(kernel, smem, maps, table, span):
    """Have one thread load a CTA's pairs of blocks, and the numbers of their pages one pair ahead."""
    state = PipelineState(kernel.ring, 1)
    pages = T.alloc_local((CONSUMERS * kernel.boxes,), "int32")
    ahead = T.alloc_local((CONSUMERS * kernel.boxes,), "int32")
    if kernel.spec.page_size > 0:
        _find_pages(kernel, table, span, span.begin, ahead)
    for i in T.serial(span.end - span.begin):
        if kernel.spec.page_size > 0:
            for each in T.unroll(CONSUMERS * kernel.boxes):
                pages[each] = ahead[each]
            _find_pages(kernel, table, span, span.begin + i + 1, ahead)
        for parity in T.unroll(CONSUMERS):
            _load_block(kernel, smem, maps, (state, parity, span.begin + i, span), pages)
        state.advance()
