"""Owns how a warp of attention against a KV cache copies blocks of keys and values to its ring in shared memory, or prefetches them.

Knows nothing of what is computed with them. A lane copies 16 bytes of a row by cp.async; nothing beyond a sequence's length is read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.compiler.intrinsics.int4_dot import cp_async_source, prefetch_source
from kerneldecl.templates.gpu.attention_decode_config import VECTOR, Copy
from kerneldecl.templates.gpu.attention_decode_warp import ALL_LANES, Warp
from kerneldecl.templates.hopper.epilogue import meta_vars

LINE_BYTES = 128
"""Bytes of one line of L2, which a prefetch loads."""


class Operand(NamedTuple):
    """Keys or values."""

    copy: Copy
    cache: Any
    stages: Any
    """Their stages in shared memory."""


def operands(warp: Warp) -> list[Operand]:
    """Return what a block consists of: keys and values, or keys alone where they hold the values."""
    keys = Operand(warp.kernel.keys_copy, warp.args.k, warp.smem.k)
    return [keys] if warp.kernel.spec.is_latent else [keys, Operand(warp.kernel.values_copy, warp.args.v, warp.smem.v)]


@T.inline
def _copy_piece(warp, operand, row, part, at):
    """Start a warp's copies of 32 vectors of some rows: zeros where the sequence has no such key, or the row has ended."""
    copy, cache, stages = meta_vars(operand)
    key, stage, first = meta_vars(at)
    column = T.meta_var((part * copy.lanes_per_row + warp.lane % copy.lanes_per_row) * VECTOR)
    is_there = T.meta_var(key < warp.length if copy.is_whole else T.And(key < warp.length, column < copy.columns))
    within = T.meta_var(column if copy.is_whole else T.min(column, copy.columns - VECTOR))
    T.cuda.func_call(
        cp_async_source(VECTOR_BYTES)[0],
        stages.ptr_to([stage, row, column]),
        cache.ptr_to([first + T.cast(within, "int64")]),
        T.Select(is_there, VECTOR_BYTES, 0),
        source_code=cp_async_source(VECTOR_BYTES)[1],
    )


@T.inline
def _copy_rows(warp, operand, key, stage, pages):
    """Start a warp's copies of its share of a block that begins at a key: every so many-th piece of 32 vectors."""
    kernel, copy, columns = meta_vars((warp.kernel, operand.copy, operand.copy.columns))
    warps_m, page_size = T.meta_var((kernel.params.warps_m, kernel.spec.page_size))
    stride, head = meta_vars((kernel.row_stride(columns), warp.place[1] * kernel.head_stride(columns)))
    pieces = T.meta_var(kernel.params.block_n // copy.rows * copy.parts)
    for i in T.unroll(-(-pieces // warps_m)):
        piece = T.meta_var(i * warps_m + warp.member)
        row = T.meta_var(piece // copy.parts * copy.rows + warp.lane // copy.lanes_per_row)
        if piece < pieces:
            at: T.int32 = T.min(key + row, warp.length - 1)
            outer: T.int32 = warp.place[0]
            if page_size > 0:
                if kernel.pages_per_block == 0:
                    outer = warp.args.table[warp.place[0] * kernel.spec.table_columns + at // page_size]
                else:
                    outer = pages[0]
                    for each in T.unroll(kernel.pages_per_block - 1):
                        outer = T.Select(row // page_size == each + 1, pages[each + 1], outer)
                at = at % page_size
            first: T.int64 = T.cast(outer, "int64") * kernel.outer_stride(columns) + T.cast(head + at * stride, "int64")
            _copy_piece(warp, operand, row, piece % copy.parts, (key + row, stage, first))


def _key_of_lane(warp: Warp, block: Any) -> Any:
    """Return the first key of the page whose number a lane holds: the pages of a group's blocks from this one on, in order."""
    kernel, pages = warp.kernel, warp.kernel.pages_per_block
    return (block + warp.lane // pages * kernel.params.groups) * kernel.params.block_n + warp.lane % pages * kernel.spec.page_size


@T.inline
def guess_pages(warp, block, found):
    """Have lanes load the numbers of pages of a group's blocks before the sequence's length is known: some may be of no page."""
    kernel = T.meta_var(warp.kernel)
    if kernel.pages_per_block > 0:
        column = T.meta_var(T.min(_key_of_lane(warp, block) // kernel.spec.page_size, kernel.spec.table_columns - 1))
        found[0] = warp.args.table[warp.place[0] * kernel.spec.table_columns + column]


@T.inline
def find_pages(warp, block, guessed, found):
    """Have lanes load the numbers of pages of a group's next blocks, one each, long before their use, if they are not those guessed."""
    kernel = T.meta_var(warp.kernel)
    if kernel.pages_per_block > 0:
        key = T.meta_var(_key_of_lane(warp, block))
        if key >= warp.length:
            found[0] = 0
        elif block != guessed:
            found[0] = warp.args.table[warp.place[0] * kernel.spec.table_columns + key // kernel.spec.page_size]


@T.inline
def fetch(warp, block, end, turn, pages, stage):
    """Start a warp's copies of a block to a stage, if there is one left, and go on to the next one; its pages are the lanes' `turn`-th."""
    kernel = T.meta_var(warp.kernel)
    found, count = T.meta_var((operands(warp), kernel.pages_per_block))
    numbers = T.alloc_local((max(count, 1),), "int32")
    if block < end:
        for each in T.unroll(count):
            numbers[each] = T.tvm_warp_shuffle(T.uint32(ALL_LANES), pages[0], turn * count + each, 32, 32)
        _copy_rows(warp, found[0], block * kernel.params.block_n, stage, numbers)
        if len(found) > 1:
            _copy_rows(warp, found[1], block * kernel.params.block_n, stage, numbers)
    T.ptx.cp.async_.commit_group()
    block = block + kernel.params.groups
    if count > 0:
        turn = turn + 1
        if turn == WARP_LANES // count:
            turn = 0
            find_pages(warp, block, -1, pages)


# ---- before the preceding kernel has ended


@T.inline
def _prefetch_rows(warp, operand, block):
    kernel, columns, lane = meta_vars((warp.kernel, operand.copy.columns, warp.lane))
    lines = T.meta_var(-(-columns * 2 // LINE_BYTES))
    name, source = T.meta_var(prefetch_source())
    for i in T.unroll(-(-kernel.prefetched_rows * lines // WARP_LANES)):
        at = T.meta_var(i * WARP_LANES + lane)
        key = T.meta_var(block * kernel.params.block_n + at // lines)
        if T.And(at < kernel.prefetched_rows * lines, key < kernel.spec.keys):
            offset = T.meta_var(
                warp.place[1] * kernel.head_stride(columns) + key * kernel.row_stride(columns) + at % lines * (LINE_BYTES // 2)
            )
            first = T.meta_var(T.cast(warp.place[0], "int64") * kernel.outer_stride(columns) + T.cast(offset, "int64"))
            T.cuda.func_call(name, operand.cache.ptr_to([first]), source_code=source)


@T.inline
def prefetch_first(warp, block):
    """Prefetch to L2 what a warp loads first: rows of a cache whose lengths are known, else lengths and numbers of pages."""
    kernel, args, lane = meta_vars((warp.kernel, warp.args, warp.lane))
    name, source = T.meta_var(prefetch_source())
    if kernel.has_lengths and kernel.spec.page_size > 0:
        column = T.meta_var(T.min(block * kernel.params.block_n // kernel.spec.page_size, kernel.spec.table_columns - 1))
        if lane == 1:
            T.cuda.func_call(name, args.table.ptr_to([warp.place[0] * kernel.spec.table_columns + column]), source_code=source)
    if kernel.has_lengths:
        if lane == 0:
            T.cuda.func_call(name, args.lengths.ptr_to([warp.place[0]]), source_code=source)
    else:
        found = T.meta_var(operands(warp))
        if warp.member == 0:
            _prefetch_rows(warp, found[0], block)
            if len(found) > 1:
                _prefetch_rows(warp, found[1], block)
