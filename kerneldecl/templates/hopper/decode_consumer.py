"""Owns the two consumer warpgroups of attention against a KV cache: scores of a block each, results of half of the columns each.

Knows nothing of how keys come to shared memory. Each block's powers are in the registers of the consumer that has its scores, and in
shared memory for the other one. Rows' references are one chain through all blocks: consumer 1 continues with those that consumer 0 has
found, and the other way round, so that both agree by how much earlier results shrink.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.backend.cuda.lang.pipeline import PipelineState
from tvm.script import tirx as T

from kerneldecl.analysis.attention import CHUNK, MMA_K
from kerneldecl.analysis.hopper_limits import WARPGROUP_THREADS
from kerneldecl.analysis.wgmma_decode import BLOCK_KEYS, CONSUMERS
from kerneldecl.templates.hopper.attention_softmax import Softmax, follow, rescale, take_scores, to_operand
from kerneldecl.templates.hopper.consumer import FENCE_SOURCE
from kerneldecl.templates.hopper.decode_config import (
    CHUNK_ELEMENTS,
    CHUNK_UNITS,
    KEY_STEP_UNITS,
    STEP_UNITS,
    WgmmaDecodeKernel,
)
from kerneldecl.templates.hopper.decode_producer import Smem, Span
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.store import STMATRIX

POWERS_BARRIER = 1
"""First of the named barriers at which consumers wait for each other's powers."""
CONSUMERS_BARRIER = 3
"""The named barrier at which both meet."""
CONSUMER_BARRIER = 4
"""First of those at which the warps of one meet."""
TURN_BARRIER = 6
"""The one at which consumer 1 waits for its turn."""
VECTOR = 8
"""Elements of 16 bits that a thread copies at once."""


class Consumer(NamedTuple):
    """A consumer warpgroup, while a kernel's script is read."""

    kernel: WgmmaDecodeKernel
    smem: Smem
    softmax: Softmax
    results: Any
    """Registers of results, not yet divided by the sums of their rows."""
    operand: Any
    """Registers of powers, rounded: wgmma's operand A."""
    limits: Any
    """The first key that each of the thread's rows does not see."""
    descriptors: Any
    """wgmma's descriptors of Q, of K and powers in the first stage, and of V there."""
    state: Any
    """Which pair of blocks is the next in shared memory, and its phase."""
    parity: int
    """0 or 1: which consumer this is, and of which blocks it takes the scores."""
    ids: tuple[Any, Any]
    """Warp, lane."""
    span: Span

    @property
    def other(self) -> int:
        return 1 - self.parity

    @property
    def thread(self) -> Any:
        return self.ids[0] * 32 + self.ids[1]

    def stage(self, parity: int) -> Any:
        """Return the stage of a block of the current pair."""
        return self.state.stage * CONSUMERS + parity

    def row(self, r: Any) -> Any:
        """Return one of the thread's two rows among those of the CTA."""
        return self.ids[0] * 16 + self.ids[1] // 4 + r * 8


@T.inline
def _fence(registers, count):
    """Keep nvcc from moving accesses to registers across here."""
    for i in T.unroll(count):
        T.cuda.func_call("tvm_wgmma_fence_operand", registers[i], source_code=FENCE_SOURCE)


@T.inline
def _release(consumer, parity):
    """Have each warp give its part of a stage back to the producers that write it."""
    place = T.meta_var(consumer.stage(parity) * CONSUMERS + consumer.parity)
    lane = T.meta_var(consumer.ids[1])
    if consumer.kernel.params.cluster == 1:
        if lane == 0:
            consumer.smem.empty.arrive(place)
    elif lane < consumer.kernel.params.cluster:
        consumer.smem.empty.arrive(place, remote=lane)


@T.inline
def _start_scores(consumer):
    """Start the product of queries and this consumer's block of the pair, as its chunks come."""
    kernel, smem, scores = meta_vars((consumer.kernel, consumer.smem, consumer.softmax.scores))
    q, k = meta_vars((consumer.descriptors[0], consumer.descriptors[1]))
    stage = T.meta_var(consumer.stage(consumer.parity))
    T.ptx.wgmma.fence.sync.aligned()
    for step in T.unroll(kernel.score_steps):
        chunk = T.meta_var(step * MMA_K // CHUNK)
        offset = T.meta_var(chunk * CHUNK_UNITS + step % (CHUNK // MMA_K) * STEP_UNITS)
        if step % (CHUNK // MMA_K) == 0:
            smem.full.wait(stage * kernel.stage_chunks + chunk, consumer.state.phase)
        T.ptx[kernel.score_mma](
            *[scores[i] for i in range(kernel.scores)],
            q + T.cast(offset, "uint64"),
            k + T.cast(stage * kernel.stage_units + offset, "uint64"),
            step > 0,
            1,
            1,
            0,
            0,
        )
    T.ptx.wgmma.commit_group.sync.aligned()


@T.inline
def _finish_scores(consumer):
    """Wait for the scores."""
    T.ptx.wgmma.wait_group.sync.aligned(0)
    _fence(consumer.softmax.scores, consumer.kernel.scores)


@T.inline
def _wait_for_values(consumer, parity, first, count):
    """Wait for chunks of a block's values; of a latent cache they came with the keys, before the block's powers."""
    kernel = T.meta_var(consumer.kernel)
    if not kernel.spec.is_latent:
        for chunk in T.unroll(count):
            consumer.smem.full.wait(
                consumer.stage(parity) * kernel.stage_chunks + kernel.first_v_chunk + first + chunk, consumer.state.phase
            )


@T.inline
def _start_results(consumer, parity):
    """Start adding the product of a block's powers, from registers if they are this consumer's, and its half of the values' columns."""
    kernel, results = meta_vars((consumer.kernel, consumer.results))
    k, v = meta_vars((consumer.descriptors[1], consumer.descriptors[2]))
    stage = T.meta_var(consumer.stage(parity) * kernel.stage_units)
    first = T.meta_var(consumer.parity * kernel.half_chunks)
    _wait_for_values(consumer, parity, first, kernel.half_chunks)
    T.ptx.wgmma.fence.sync.aligned()
    for step in T.unroll(kernel.value_steps):
        values = T.meta_var(v + T.cast(stage + (kernel.first_v_chunk + first) * CHUNK_UNITS + step * KEY_STEP_UNITS, "uint64"))
        if parity == consumer.parity:
            T.ptx[kernel.value_mma](
                *[results[i] for i in range(kernel.results)],
                *[consumer.operand[step * 4 + q] for q in range(4)],
                values,
                tirx.const(True, "bool"),
                1,
                1,
                1,
            )
        else:
            T.ptx[kernel.value_mma](
                *[results[i] for i in range(kernel.results)],
                k + T.cast(stage + kernel.powers_chunk * CHUNK_UNITS + step * STEP_UNITS, "uint64"),
                values,
                tirx.const(True, "bool"),
                1,
                1,
                0,
                1,
            )
    T.ptx.wgmma.commit_group.sync.aligned()


@T.inline
def _finish_results(consumer, parity):
    """Wait for all products, and give a stage back."""
    T.ptx.wgmma.wait_group.sync.aligned(0)
    _fence(consumer.results, consumer.kernel.results)
    _release(consumer, parity)


@T.inline
def _clear_values(consumer, first_unseen):
    """Set the values of keys that the sequence does not have to zero: powers of zero do not hide what is there, which may be NaN."""
    kernel, kv = meta_vars((consumer.kernel, consumer.smem.kv))
    stage = T.meta_var(consumer.stage(consumer.parity))
    per_row = T.meta_var(kernel.v_chunks * (CHUNK // VECTOR))
    _wait_for_values(consumer, consumer.parity, 0, kernel.v_chunks)
    # All warps have multiplied the keys, of which the values may be a part.
    T.cuda.warpgroup_sync(CONSUMER_BARRIER + consumer.parity)
    vectors: T.let = (BLOCK_KEYS - first_unseen) * per_row
    for i in T.serial((vectors + WARPGROUP_THREADS - 1) // WARPGROUP_THREADS):
        at = T.meta_var(i * WARPGROUP_THREADS + consumer.thread)
        row, vector = meta_vars((first_unseen + at // per_row, at % per_row))
        if at < vectors:
            chunk = T.meta_var(kernel.first_v_chunk + vector // VECTOR)
            for x in T.vectorized(VECTOR):
                kv[stage, chunk * CHUNK_ELEMENTS + row * CHUNK + vector % VECTOR * VECTOR + x] = tirx.const(0, kernel.spec.dtype)
    T.ptx.fence.proxy.async_.shared__cta()


@T.inline
def _hide_unseen(consumer, block):
    """Set scores of keys that rows do not see to minus infinity, and the values of those that the sequence does not have to zero."""
    kernel, span = meta_vars((consumer.kernel, consumer.span))
    for i in T.unroll(kernel.scores):
        key = T.meta_var(block * BLOCK_KEYS + i // 4 * 8 + consumer.ids[1] % 4 * 2 + i % 2)
        lowest = T.meta_var(tirx.const(float("-inf"), "float32"))
        consumer.softmax.scores[i] = T.Select(key < consumer.limits[i % 4 // 2], consumer.softmax.scores[i], lowest)
    if block * BLOCK_KEYS < span.length:
        if (block + 1) * BLOCK_KEYS > span.length:
            _clear_values(consumer, span.length - block * BLOCK_KEYS)


@T.inline
def _share_powers(consumer):
    """Leave powers and references in shared memory for the other consumer, and tell it."""
    kernel, smem, parity = meta_vars((consumer.kernel, consumer.smem, consumer.parity))
    warp, lane = meta_vars(consumer.ids)
    # All warps have multiplied the keys in whose place powers come.
    T.cuda.warpgroup_sync(CONSUMER_BARRIER + parity)
    for step in T.unroll(kernel.value_steps):
        line = T.meta_var(warp * 16 + lane % 16)
        piece = T.meta_var(T.bitwise_xor(step * 2 + lane // 16, lane % 8))
        T.ptx[STMATRIX.format(4, "")](
            smem.kv.ptr_to([consumer.stage(parity), kernel.powers_chunk * CHUNK_ELEMENTS + line * CHUNK + piece * VECTOR]),
            *[consumer.operand[step * 4 + q] for q in range(4)],
        )
    for r in T.unroll(2):
        if lane % 4 == 0:
            smem.references[parity, consumer.row(r)] = consumer.softmax.reference[r]
    T.ptx.fence.proxy.async_.shared__cta()
    T.ptx.bar.arrive(T.uint32(POWERS_BARRIER + parity), T.uint32(CONSUMERS * WARPGROUP_THREADS))


@T.inline
def _take_block(consumer, block):
    """Turn this consumer's scores, which are there, into powers, and leave them for the other one."""
    span = T.meta_var(consumer.span)
    if (block + 1) * BLOCK_KEYS > consumer.kernel.limit(span.length, 0):
        _hide_unseen(consumer, block)
    take_scores(consumer.softmax)
    to_operand(consumer.softmax, consumer.operand)
    _share_powers(consumer)


@T.inline
def _follow_other(consumer):
    """Wait for the other consumer's powers, and shrink earlier results as these did."""
    T.ptx.bar.sync(T.uint32(POWERS_BARRIER + consumer.other), T.uint32(CONSUMERS * WARPGROUP_THREADS))
    for r in T.unroll(2):
        consumer.softmax.partial[r] = consumer.smem.references[consumer.other, consumer.row(r)]
    follow(consumer.softmax)
    rescale(consumer.softmax, consumer.results, consumer.kernel.results)


@T.inline
def _first_pair(consumer, pair):
    """Have consumer 0 take a pair of blocks."""
    _start_scores(consumer)
    if consumer.kernel.params.turns == 1:
        T.ptx.bar.arrive(T.uint32(TURN_BARRIER), T.uint32(CONSUMERS * WARPGROUP_THREADS))
    _finish_scores(consumer)
    _take_block(consumer, pair * CONSUMERS)
    rescale(consumer.softmax, consumer.results, consumer.kernel.results)
    _start_results(consumer, 0)
    _finish_results(consumer, 0)
    _follow_other(consumer)
    _start_results(consumer, 1)
    _finish_results(consumer, 1)
    consumer.state.advance()


@T.inline
def _second_pair(consumer, pair):
    """Have consumer 1 take a pair of blocks: the other's powers and values are multiplied during its softmax."""
    if consumer.kernel.params.turns == 1:
        T.ptx.bar.sync(T.uint32(TURN_BARRIER), T.uint32(CONSUMERS * WARPGROUP_THREADS))
    _start_scores(consumer)
    _finish_scores(consumer)
    _follow_other(consumer)
    _start_results(consumer, 0)
    _take_block(consumer, pair * CONSUMERS + 1)
    _finish_results(consumer, 0)
    rescale(consumer.softmax, consumer.results, consumer.kernel.results)
    _start_results(consumer, 1)
    _finish_results(consumer, 1)
    consumer.state.advance()


@T.inline
def go_through_pairs(consumer):
    """Have a consumer go through the pairs of blocks of its CTA."""
    span = T.meta_var(consumer.span)
    for i in T.serial(span.end - span.begin):
        if consumer.parity == 0:
            _first_pair(consumer, span.begin + i)
        else:
            _second_pair(consumer, span.begin + i)


def consumer_of(kernel: WgmmaDecodeKernel, smem: Smem, span: Span, parity: int, ids: tuple[Any, Any]) -> Consumer:
    """Return a consumer with registers and descriptors of its own, while a kernel's script is read."""
    softmax = Softmax(
        kernel,
        scores=T.alloc_local((kernel.scores,), "float32"),
        reference=T.alloc_local((2,), "float32"),
        total=T.alloc_local((4,), "float32"),
        factor=T.alloc_local((2,), "float32"),
        partial=T.alloc_local((4,), "float32"),
        grows=T.alloc_local((1,), "int32"),
    )
    return Consumer(
        kernel=kernel,
        smem=smem,
        softmax=softmax,
        results=T.alloc_local((kernel.results,), "float32"),
        operand=T.alloc_local((kernel.scores // 2,), "uint32"),
        limits=T.alloc_local((2,), "int32"),
        descriptors=T.alloc_local((3,), "uint64"),
        state=PipelineState(kernel.ring, 0),
        parity=parity,
        ids=ids,
        span=span,
    )


@T.inline
def prepare(consumer):
    """Make descriptors, set results to zero, and find out which keys rows see."""
    kernel, smem, span = meta_vars((consumer.kernel, consumer.smem, consumer.span))
    descriptors = T.meta_var(consumer.descriptors)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptors[0]), smem.q.ptr_to([0]), *kernel.rows_descriptor)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptors[1]), smem.kv.ptr_to([0, 0]), *kernel.rows_descriptor)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptors[2]), smem.kv.ptr_to([0, 0]), *kernel.values_descriptor)
    for i in T.unroll(kernel.results):
        consumer.results[i] = T.float32(0)
    for i in T.unroll(4):
        consumer.softmax.total[i] = T.float32(0)
    for r in T.unroll(2):
        consumer.softmax.reference[r] = tirx.const(float("-inf"), "float32")
        consumer.limits[r] = T.min(kernel.limit(span.length, span.place[2] + consumer.row(r)), span.length)
