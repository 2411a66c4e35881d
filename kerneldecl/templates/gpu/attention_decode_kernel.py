"""Owns the TIRx kernel of attention against a KV cache: each warp streams blocks of keys and values through a ring in shared memory.

Knows nothing of how parameters are chosen. The products are transposed: S^T = K Q^T and O^T = V^T P^T. So keys, then elements of values,
fill the 16 rows of mma.sync, and eight rows of queries its columns; of few queries, fewer are wasted, and fragments of K and V serve all
of them. Powers come as an accumulator with keys along rows; movmatrix makes them the operand with keys along columns.

A lane holds scores of keys `lane / 4` and 8 further, and of rows `lane % 4 * 2` and the next one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.compiler.intrinsics.int4_dot import cp_async_source, prefetch_source
from kerneldecl.templates.gpu.attention_decode_config import VECTOR, Copy, DecodeKernel
from kerneldecl.templates.hopper.epilogue import meta_vars

ALL_LANES = 0xFFFFFFFF
MAX_POWER_LOG2 = 8
"""How far a maximum may grow, as a power of two, before earlier results shrink to it. Powers are 256 at most then."""
LINE_BYTES = 128
"""Bytes of one line of L2, which a prefetch loads."""
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16"
MOVMATRIX = "movmatrix.sync.aligned.m8n8.trans.b16"


class Args(NamedTuple):
    """Flat buffers of the function's arguments; `table` and `lengths` are None where there are none."""

    q: Any
    k: Any
    v: Any
    table: Any
    lengths: Any
    o: Any


class Smem(NamedTuple):
    """Buffers in shared memory."""

    k: Any
    v: Any
    results: Any
    """In the place of both, once all warps are done: results by warp and row."""
    references: Any
    """By warp and row."""
    totals: Any


class Registers(NamedTuple):
    """A lane's registers."""

    q: Any
    acc: Any
    """Results, not yet divided by the sums of their rows."""
    scores: Any
    powers: Any
    """Powers, rounded: operand B."""
    reference: Any
    """What is subtracted from the scores of each row: their maximum, or what it was `MAX_POWER_LOG2` ago."""
    total: Any
    """Sums of powers of this lane alone."""
    partial: Any
    """Maxima of a block, then what earlier results are multiplied by."""
    limit: Any
    """The first key that a row does not see."""


class Warp(NamedTuple):
    """A warp's view of the kernel."""

    kernel: DecodeKernel
    args: Args
    smem: Smem
    registers: Registers
    place: tuple[Any, Any, Any]
    """Sequence, head of keys, and the first row of queries."""
    length: Any
    ids: tuple[Any, Any]
    """Warp, lane."""

    @property
    def lane(self) -> Any:
        return self.ids[1]

    @property
    def first_stage(self) -> Any:
        return self.ids[0] * self.kernel.params.stages


def _mma(kernel: DecodeKernel) -> str:
    kind = "bf16" if kernel.is_bfloat16 else "f16"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"


def _narrow(kernel: DecodeKernel) -> str:
    return f"cvt.rn.{'bf16' if kernel.is_bfloat16 else 'f16'}x2.f32"


def _finite(value: Any) -> Any:
    """Return a row's reference, or zero for a row that has seen no key yet: then each score's distance to it is minus infinity."""
    return T.Select(value == tirx.const(float("-inf"), "float32"), T.float32(0), value)


@T.inline
def load_queries(warp):
    """Load a lane's elements of Q, operand B of the scores; zeros for rows and elements that are not there."""
    kernel, lane = meta_vars((warp.kernel, warp.lane))
    batch, head, first = meta_vars(warp.place)
    words = T.decl_buffer(
        (kernel.spec.batch * kernel.spec.heads * kernel.spec.queries * kernel.spec.head_dim // 2,), "uint32", data=warp.args.q.data
    )
    for r in T.unroll(kernel.params.row_tiles):
        row = T.meta_var(first + r * 8 + lane // 4)
        at = T.meta_var(kernel.query_offset(batch, head, row, kernel.spec.head_dim))
        for i in T.unroll(kernel.score_steps * 2):
            column = T.meta_var(i * 8 + lane % 4 * 2)
            warp.registers.q[r * kernel.score_steps * 2 + i] = T.uint32(0)
            if T.And(row < kernel.group_rows, column < kernel.spec.head_dim):
                warp.registers.q[r * kernel.score_steps * 2 + i] = words[(at + column) // 2]


@T.inline
def prepare(warp):
    """Set results to zero, and find out which keys rows see."""
    kernel, registers = T.meta_var((warp.kernel, warp.registers))
    for i in T.unroll(kernel.params.row_tiles * kernel.value_steps * 4):
        registers.acc[i] = T.float32(0)
    for i in T.unroll(kernel.params.row_tiles * 2):
        row = T.meta_var(warp.place[2] + i // 2 * 8 + warp.lane % 4 * 2 + i % 2)
        registers.reference[i] = tirx.const(float("-inf"), "float32")
        registers.total[i] = T.float32(0)
        registers.limit[i] = kernel.limit(warp.length, row)


# ---- copies


def _copy_of(kernel: DecodeKernel, is_key: bool) -> Copy:  # noqa: FBT001  positional, in scripts
    return kernel.keys_copy if is_key else kernel.values_copy


@T.inline
def _copy_rows(warp, cache, buffer, is_key, key, stage, page):
    """Start a warp's cp.async of the rows of a block that begins at a key, with zeros beyond the sequence's end."""
    kernel, lane = meta_vars((warp.kernel, warp.lane))
    copy = T.meta_var(_copy_of(kernel, is_key))
    stride, head = meta_vars((kernel.row_stride(copy.columns), warp.place[1] * kernel.head_stride(copy.columns)))
    for i in T.unroll(kernel.params.block_n // copy.rows):
        row = T.meta_var(i * copy.rows + lane // copy.lanes_per_row)
        at: T.int32 = T.min(key + row, warp.length - 1)
        outer: T.int32 = page
        if kernel.spec.page_size > 0:
            if not kernel.page_per_block:
                outer = warp.args.table[warp.place[0] * kernel.spec.table_columns + at // kernel.spec.page_size]
            at = at % kernel.spec.page_size
        first: T.int64 = T.cast(outer, "int64") * kernel.outer_stride(copy.columns) + T.cast(head + at * stride, "int64")
        for part in T.unroll(copy.parts):
            column = T.meta_var((part * copy.lanes_per_row + lane % copy.lanes_per_row) * VECTOR)
            is_there = T.meta_var(key + row < warp.length if copy.is_whole else T.And(key + row < warp.length, column < copy.columns))
            within = T.meta_var(column if copy.is_whole else T.min(column, copy.columns - VECTOR))
            T.cuda.func_call(
                cp_async_source(VECTOR_BYTES)[0],
                buffer.ptr_to([stage, row, column]),
                cache.ptr_to([first + T.cast(within, "int64")]),
                T.Select(is_there, VECTOR_BYTES, 0),
                source_code=cp_async_source(VECTOR_BYTES)[1],
            )


@T.inline
def _next_page(warp, block, end, page):
    """Find out which page a block of keys is in: with one load, as early as its use allows."""
    kernel = T.meta_var(warp.kernel)
    if kernel.spec.page_size > 0 and kernel.page_per_block:
        if block < end:
            page = warp.args.table[warp.place[0] * kernel.spec.table_columns + block // (kernel.spec.page_size // kernel.params.block_n)]


@T.inline
def fetch(warp, block, end, page, stage):
    """Start the copies of a block of keys and values to a stage, if the warp has one left."""
    kernel = T.meta_var(warp.kernel)
    if block < end:
        key = T.meta_var(block * kernel.params.block_n)
        _copy_rows(warp, warp.args.k, warp.smem.k, True, key, stage, page)
        if not kernel.spec.is_latent:
            _copy_rows(warp, warp.args.v, warp.smem.v, False, key, stage, page)
    T.ptx.cp.async_.commit_group()
    block = block + kernel.params.warps
    _next_page(warp, block, end, page)


# ---- products


@T.inline
def _multiply_keys(warp, stage):
    """Multiply a block of keys with the queries."""
    kernel, registers, lane = meta_vars((warp.kernel, warp.registers, warp.lane))
    count, scores, q = T.meta_var((kernel.params.row_tiles, registers.scores, registers.q))
    a = T.alloc_local((4,), "uint32")
    for i in T.unroll(kernel.sub_blocks * count * 4):
        scores[i] = T.float32(0)
    for step in T.unroll(kernel.score_steps):
        for t in T.unroll(kernel.sub_blocks):
            T.ptx[LDMATRIX.format("")](
                *[a[x] for x in range(4)], warp.smem.k.ptr_to([stage, t * 16 + lane % 16, step * 16 + lane // 16 * 8])
            )
            for r in T.unroll(count):
                T.ptx[_mma(kernel)](
                    *[scores[(t * count + r) * 4 + x] for x in range(4)],
                    *[a[x] for x in range(4)],
                    *[q[(r * kernel.score_steps + step) * 2 + x] for x in range(2)],
                    *[scores[(t * count + r) * 4 + x] for x in range(4)],
                )


@T.inline
def _multiply_values(warp, stage):
    """Add the products of a block's values and powers to the results."""
    kernel, registers, lane = meta_vars((warp.kernel, warp.registers, warp.lane))
    count, acc, powers = T.meta_var((kernel.params.row_tiles, registers.acc, registers.powers))
    values = T.meta_var(warp.smem.k if kernel.spec.is_latent else warp.smem.v)
    a = T.alloc_local((4,), "uint32")
    for t in T.unroll(kernel.sub_blocks):
        for step in T.unroll(kernel.value_steps):
            T.ptx[LDMATRIX.format(".trans")](
                *[a[x] for x in range(4)],
                values.ptr_to([stage, t * 16 + lane // 16 * 8 + lane % 8, step * 16 + lane // 8 % 2 * 8]),
            )
            for r in T.unroll(count):
                T.ptx[_mma(kernel)](
                    *[acc[(r * kernel.value_steps + step) * 4 + x] for x in range(4)],
                    *[a[x] for x in range(4)],
                    *[powers[(t * count + r) * 2 + x] for x in range(2)],
                    *[acc[(r * kernel.value_steps + step) * 4 + x] for x in range(4)],
                )


# ---- softmax


@T.inline
def _mask(warp, block):
    """Set scores of keys that a row does not see to minus infinity."""
    kernel, registers = T.meta_var((warp.kernel, warp.registers))
    count = T.meta_var(kernel.params.row_tiles)
    for i in T.unroll(kernel.sub_blocks * count * 4):
        key = T.meta_var(block * kernel.params.block_n + i // (4 * count) * 16 + i % 4 // 2 * 8 + warp.lane // 4)
        if key >= registers.limit[i // 4 % count * 2 + i % 2]:
            registers.scores[i] = tirx.const(float("-inf"), "float32")


@T.inline
def _follow_maxima(warp):
    """Raise the rows' references where a maximum has grown far in any row of the warp, and shrink what came before."""
    kernel, registers = T.meta_var((warp.kernel, warp.registers))
    count, partial, reference = T.meta_var((kernel.params.row_tiles, registers.partial, registers.reference))
    grows: T.int32 = 0
    for i in T.unroll(count * 2):
        partial[i] = registers.scores[i // 2 * 4 + i % 2]
        for t in T.unroll(kernel.sub_blocks * 2 - 1):
            partial[i] = T.max(partial[i], registers.scores[((t + 1) // 2 * count + i // 2) * 4 + (t + 1) % 2 * 2 + i % 2])
        if partial[i] - reference[i] > T.float32(MAX_POWER_LOG2 / kernel.scale_log2):
            grows = 1
    if T.cuda.any_sync(T.uint32(ALL_LANES), grows) != 0:
        for i in T.unroll(count * 2):
            partial[i] = T.max(partial[i], reference[i])
            for bit in T.unroll(3):
                partial[i] = T.max(partial[i], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), partial[i], 4 << bit, 32, 32))
            factor: T.float32 = T.exp2((reference[i] - _finite(partial[i])) * T.float32(kernel.scale_log2))
            reference[i] = partial[i]
            partial[i] = factor
            registers.total[i] = registers.total[i] * factor
        for i in T.unroll(count * kernel.value_steps * 4):
            registers.acc[i] = registers.acc[i] * partial[i // (kernel.value_steps * 4) * 2 + i % 2]


@T.inline
def _raise(warp):
    """Turn scores into powers of two of their distance to the rows' references, add them up, and round them to operand B."""
    kernel, registers = T.meta_var((warp.kernel, warp.registers))
    count, scores = T.meta_var((kernel.params.row_tiles, registers.scores))
    packed = T.alloc_local((1,), "uint32")
    for i in T.unroll(count * 2):
        registers.partial[i] = _finite(registers.reference[i]) * T.float32(-kernel.scale_log2)
    for i in T.unroll(kernel.sub_blocks * count * 4):
        row = T.meta_var(i // 4 % count * 2 + i % 2)
        scores[i] = T.exp2(scores[i] * T.float32(kernel.scale_log2) + registers.partial[row])
        registers.total[row] = registers.total[row] + scores[i]
    for i in T.unroll(kernel.sub_blocks * count * 2):
        T.ptx[_narrow(kernel)](packed[0], scores[i * 2 + 1], scores[i * 2])
        T.ptx[MOVMATRIX](registers.powers[i], packed[0])


@T.inline
def multiply(warp, block, stage):
    """Add a block of keys and values to a warp's results."""
    kernel = T.meta_var(warp.kernel)
    _multiply_keys(warp, stage)
    seen_by_all = T.meta_var(kernel.limit(warp.length, 0))
    if (block + 1) * kernel.params.block_n > seen_by_all:
        _mask(warp, block)
    _follow_maxima(warp)
    _raise(warp)
    _multiply_values(warp, stage)


@T.inline
def stream(warp, begin, end):
    """Go through a warp's blocks of keys: wait for one, fetch the one `stages - 1` further into the freed stage, multiply."""
    kernel, params = T.meta_var((warp.kernel, warp.kernel.params))
    fetched: T.int32 = begin + warp.ids[0]
    page: T.int32 = warp.place[0]
    _next_page(warp, fetched, end, page)
    for s in T.unroll(params.stages - 1):
        fetch(warp, fetched, end, page, warp.first_stage + s)
    load_queries(warp)
    prepare(warp)
    block: T.int32 = begin + warp.ids[0]
    slot: T.int32 = 0
    while block < end:
        T.ptx.cp.async_.wait_group(params.stages - 2)
        T.cuda.warp_sync()
        # Into the stage that every lane has finished reading.
        freed = T.meta_var(T.Select(slot == 0, params.stages - 1, slot - 1))
        fetch(warp, fetched, end, page, warp.first_stage + freed)
        multiply(warp, block, warp.first_stage + slot)
        slot = T.Select(slot == params.stages - 1, 0, slot + 1)
        block = block + params.warps
    T.ptx.cp.async_.wait_group(0)


# ---- the end of a thread block


@T.inline
def gather(warp):
    """Have all warps leave their results in shared memory, as distances to the block's maxima, and the sums of their rows."""
    kernel, registers, smem = T.meta_var((warp.kernel, warp.registers, warp.smem))
    params = T.meta_var(kernel.params)
    number, lane = meta_vars(warp.ids)
    for i in T.unroll(params.row_tiles * 2):
        for bit in T.unroll(3):
            registers.total[i] = registers.total[i] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), registers.total[i], 4 << bit, 32, 32)
        if lane < 4:
            smem.references[number, i // 2 * 8 + lane * 2 + i % 2] = registers.reference[i]
    T.cuda.cta_sync()
    for i in T.unroll(params.row_tiles * 2):
        row = T.meta_var(i // 2 * 8 + lane % 4 * 2 + i % 2)
        highest: T.float32 = smem.references[0, row]
        for other in T.unroll(params.warps - 1):
            highest = T.max(highest, smem.references[other + 1, row])
        registers.partial[i] = T.exp2((registers.reference[i] - _finite(highest)) * T.float32(kernel.scale_log2))
        if lane < 4:
            smem.totals[number, row] = registers.total[i] * registers.partial[i]
    for i in T.unroll(params.row_tiles * kernel.value_steps * 4):
        tile, step = meta_vars((i // (kernel.value_steps * 4), i // 4 % kernel.value_steps))
        row = T.meta_var(tile * 8 + lane % 4 * 2 + i % 2)
        smem.results[number, row, step * 16 + i % 4 // 2 * 8 + lane // 4] = registers.acc[i] * registers.partial[tile * 2 + i % 2]
    T.cuda.cta_sync()


@T.inline
def store(warp, workspace, part, split):
    """Have a thread block add up its warps' results, always in the same order, and store them: in O, or for the kernel that combines."""
    kernel, smem = T.meta_var((warp.kernel, warp.smem))
    number, lane = meta_vars(warp.ids)
    params, columns = meta_vars((kernel.params, kernel.spec.value_dim))
    batch, head, first = meta_vars(warp.place)
    pairs = T.meta_var(params.rows * columns // 2)
    sums = T.alloc_local((3,), "float32")
    for i in T.serial(-(-pairs // params.threads)):
        at = T.meta_var(i * params.threads + number * WARP_LANES + lane)
        row, column = meta_vars((at // (columns // 2), at % (columns // 2) * 2))
        if T.And(at < pairs, first + row < kernel.group_rows):
            for x in T.unroll(3):
                sums[x] = T.float32(0)
            for other in T.unroll(params.warps):
                for x in T.unroll(2):
                    sums[x] = sums[x] + smem.results[other, row, column + x]
                sums[2] = sums[2] + smem.totals[other, row]
            if params.split_k == 1:
                inverse: T.float32 = T.Select(sums[2] == T.float32(0), T.float32(0), T.float32(1) / sums[2])
                o = T.meta_var(kernel.query_offset(batch, head, first + row, columns) + column)
                for x in T.vectorized(2):
                    warp.args.o[o + x] = T.cast(sums[x] * inverse, kernel.spec.dtype)
            else:
                for x in T.vectorized(2):
                    workspace.results[part, split, row, column + x] = sums[x]
                if column == 0:
                    highest: T.float32 = smem.references[0, row]
                    for other in T.unroll(params.warps - 1):
                        highest = T.max(highest, smem.references[other + 1, row])
                    workspace.stats[part, split, row, 0] = highest
                    workspace.stats[part, split, row, 1] = sums[2]


# ---- before the preceding kernel has ended


@T.inline
def _prefetch_rows(warp, block, is_value):
    kernel, lane = meta_vars((warp.kernel, warp.lane))
    columns = T.meta_var(kernel.spec.value_dim if is_value else kernel.spec.head_dim)
    cache = T.meta_var(warp.args.v if is_value else warp.args.k)
    lines = T.meta_var(-(-columns * 2 // LINE_BYTES))
    for i in T.unroll(-(-kernel.prefetched_rows * lines // WARP_LANES)):
        at = T.meta_var(i * WARP_LANES + lane)
        key = T.meta_var(block * kernel.params.block_n + at // lines)
        if T.And(at < kernel.prefetched_rows * lines, key < kernel.spec.keys):
            offset = T.meta_var(
                warp.place[1] * kernel.head_stride(columns) + key * kernel.row_stride(columns) + at % lines * (LINE_BYTES // 2)
            )
            T.cuda.func_call(
                prefetch_source()[0],
                cache.ptr_to([T.cast(warp.place[0], "int64") * kernel.outer_stride(columns) + T.cast(offset, "int64")]),
                source_code=prefetch_source()[1],
            )


@T.inline
def prefetch_first(warp, block):
    """Prefetch to L2 what a warp loads first: rows of a cache whose lengths are known, else lengths and numbers of pages."""
    kernel, args, lane = meta_vars((warp.kernel, warp.args, warp.lane))
    batch, head, _ = meta_vars(warp.place)
    name, source = T.meta_var(prefetch_source())
    if kernel.has_lengths:
        if lane == 0:
            T.cuda.func_call(name, args.lengths.ptr_to([batch]), source_code=source)
    if kernel.spec.page_size > 0:
        if lane == 1:
            page = T.meta_var(T.min(block * kernel.params.block_n // kernel.spec.page_size, kernel.spec.table_columns - 1))
            T.cuda.func_call(name, args.table.ptr_to([batch * kernel.spec.table_columns + page]), source_code=source)
    _prefetch_rows(warp, block, False)
    if not kernel.spec.is_latent:
        _prefetch_rows(warp, block, True)
