"""Owns the products of attention against a KV cache, and the online softmax between them, for a block of keys of a warp.

Knows nothing of how keys and values come to shared memory. The products are transposed: S^T = K Q^T and O^T = V^T P^T. So keys, then
elements of values, fill the 16 rows of mma.sync, and eight rows of queries its columns: of few queries, fewer are wasted, and fragments of
K and V serve all of them. Powers come as an accumulator with keys along rows; movmatrix makes them the operand with keys along columns.

A lane holds scores of keys `lane / 4` and 8 further, and of rows `lane % 4 * 2` and the next one.
Source of the online softmax: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.gpu.attention_decode_combine import finite
from kerneldecl.templates.gpu.attention_decode_config import DecodeKernel
from kerneldecl.templates.gpu.attention_decode_warp import ALL_LANES
from kerneldecl.templates.hopper.epilogue import meta_vars

MAX_POWER_LOG2 = 8
"""How far a maximum may grow, as a power of two, before earlier results shrink to it. Powers are 256 at most then."""
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16"
MOVMATRIX = "movmatrix.sync.aligned.m8n8.trans.b16"


def _mma(kernel: DecodeKernel) -> str:
    kind = "bf16" if kernel.is_bfloat16 else "f16"
    return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"


def _narrow(kernel: DecodeKernel) -> str:
    return f"cvt.rn.{'bf16' if kernel.is_bfloat16 else 'f16'}x2.f32"


@T.inline
def load_queries(warp):
    """Load a lane's elements of Q, operand B of the scores; zeros for rows and elements that are not there."""
    kernel, lane = meta_vars((warp.kernel, warp.lane))
    batch, head, first = meta_vars(warp.place)
    words = T.decl_buffer(
        (kernel.spec.batch * kernel.spec.heads * kernel.spec.queries * kernel.spec.head_dim // 2,), "uint32", data=warp.args.q.data
    )
    for r in T.unroll(kernel.params.row_tiles):
        row = T.meta_var(first + warp.first_row + r * 8 + lane // 4)
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
        row = T.meta_var(warp.place[2] + warp.first_row + i // 2 * 8 + warp.lane % 4 * 2 + i % 2)
        registers.reference[i] = tirx.const(float("-inf"), "float32")
        registers.total[i] = T.float32(0)
        registers.limit[i] = kernel.limit(warp.length, row)


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
            factor: T.float32 = T.exp2((reference[i] - finite(partial[i])) * T.float32(kernel.scale_log2))
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
        registers.partial[i] = finite(registers.reference[i]) * T.float32(-kernel.scale_log2)
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
