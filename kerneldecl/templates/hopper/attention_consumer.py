"""Owns the consumer warpgroups of an attention kernel: products on wgmma around the online softmax, and the store of results.

Knows nothing of how queries, keys and values come to shared memory. The overlap of products and softmax, and the turns of consumers,
are those of Shah et al., FlashAttention-3, 2024.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.backend.cuda.lang.pipeline import PipelineState
from tvm.script import tirx as T

from kerneldecl.analysis.attention import ITEM_BYTES
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.hopper.attention_bias import Rows
from kerneldecl.templates.hopper.attention_config import AttentionKernel
from kerneldecl.templates.hopper.attention_producer import Smem, Tile
from kerneldecl.templates.hopper.attention_softmax import (
    Softmax,
    await_sums,
    finish_rows,
    first_softmax,
    load_scales,
    next_softmax,
    rescale,
    scale_results,
    store_sums,
    to_operand,
)
from kerneldecl.templates.hopper.attention_store import give_back_queries, store_results
from kerneldecl.templates.hopper.consumer import FENCE_SOURCE
from kerneldecl.templates.hopper.epilogue import meta_vars

TURN_BARRIER = 5
"""First of the named barriers at which consumers wait for their turn."""


class Consumer(NamedTuple):
    """A consumer warpgroup, while a kernel's script is read."""

    kernel: AttentionKernel
    smem: Smem
    softmax: Softmax
    results: Any
    """Registers of results, not yet divided by the sums of their rows."""
    operand: Any
    """Registers of powers, rounded: wgmma's operand A."""
    descriptors: tuple[Any, Any, Any]
    """wgmma's descriptors of the first stages of Q (of this consumer's rows), K and V."""
    states: tuple[Any, Any, Any]
    """Which stage of Q, K and V comes next, and its phase."""
    index: Any
    lanes: tuple[Any, Any]
    """Warp of the warpgroup, lane."""

    other_scores: Any
    """Registers of the next block's scores; None where they have none of their own."""

    @property
    def scores(self) -> Any:
        return self.softmax.scores

    def with_other_scores(self) -> Consumer:
        return self._replace(softmax=self.softmax._replace(scores=self.other_scores))


@T.inline
def _fence(registers, count):
    """Keep nvcc from moving accesses to registers across here."""
    for i in T.unroll(count):
        T.cuda.func_call("tvm_wgmma_fence_operand", registers[i], source_code=FENCE_SOURCE)


@T.inline
def _release(consumer, barriers, state):
    """Have each warp give a stage back to the producers that write it, and go on to the next one."""
    lane = T.meta_var(consumer.lanes[1])
    if consumer.kernel.params.cluster == 1:
        if lane == 0:
            barriers.arrive(state.stage)
    elif lane < consumer.kernel.params.cluster:
        barriers.arrive(state.stage, remote=lane)
    state.advance()


@T.inline
def _start_scores(consumer):
    """Start the product of queries and the next block of keys."""
    kernel, smem = T.meta_var((consumer.kernel, consumer.smem))
    q, k = meta_vars(consumer.descriptors[:2])
    q_state, k_state = meta_vars(consumer.states[:2])
    q_units = T.meta_var(kernel.params.consumers * kernel.q_elements * ITEM_BYTES // 16)
    smem.k_full.wait(k_state.stage, k_state.phase)
    T.ptx.wgmma.fence.sync.aligned()
    for step in T.unroll(kernel.score_steps):
        T.ptx[kernel.score_mma](
            *[consumer.scores[i] for i in range(kernel.scores)],
            q + T.cast(q_state.stage * q_units + kernel.q_offset(step), "uint64"),
            k + T.cast(k_state.stage * (kernel.k_elements * ITEM_BYTES // 16) + kernel.k_offset(step), "uint64"),
            step > 0,
            1,
            1,
            *kernel.score_orders,
        )
    T.ptx.wgmma.commit_group.sync.aligned()


@T.inline
def _start_results(consumer):
    """Start adding the product of powers and the next block of values."""
    kernel, smem = T.meta_var((consumer.kernel, consumer.smem))
    v = T.meta_var(consumer.descriptors[2])
    v_state = T.meta_var(consumer.states[2])
    smem.v_full.wait(v_state.stage, v_state.phase)
    T.ptx.wgmma.fence.sync.aligned()
    for step in T.unroll(kernel.value_steps):
        T.ptx[kernel.value_mma](
            *[consumer.results[i] for i in range(kernel.results)],
            *[consumer.operand[step * 4 + q] for q in range(4)],
            v + T.cast(v_state.stage * (kernel.v_elements * ITEM_BYTES // 16) + kernel.v_offset(step), "uint64"),
            tirx.const(True, "bool"),
            1,
            1,
            *kernel.value_orders,
        )
    T.ptx.wgmma.commit_group.sync.aligned()


@T.inline
def _finish_scores(consumer, left):
    """Wait for the scores, while so many groups of products go on, and give the keys back."""
    k_state = T.meta_var(consumer.states[1])
    T.ptx.wgmma.wait_group.sync.aligned(left)
    _fence(consumer.scores, consumer.kernel.scores)
    _release(consumer, consumer.smem.k_empty, k_state)


@T.inline
def _finish_results(consumer, left):
    """Wait for the results, while so many groups of products go on, and give the values back."""
    v_state = T.meta_var(consumer.states[2])
    T.ptx.wgmma.wait_group.sync.aligned(left)
    _fence(consumer.results, consumer.kernel.results)
    _release(consumer, consumer.smem.v_empty, v_state)


@T.inline
def _wait_for_turn(consumer):
    if consumer.kernel.params.pingpong > 0:
        T.ptx.bar.sync(T.cast(TURN_BARRIER + consumer.index, "uint32"), T.uint32(256))


@T.inline
def _pass_turn(consumer):
    consumers = T.meta_var(consumer.kernel.params.consumers)
    if consumer.kernel.params.pingpong > 0:
        T.ptx.bar.arrive(T.cast(TURN_BARRIER + (consumer.index + 1) % consumers, "uint32"), T.uint32(256))


@T.inline
def _next_block(consumer, rows, block, is_masked):
    """Add a block of values to the results, and take the next block of keys' scores; those products overlap with its softmax."""
    softmax = T.meta_var(consumer.softmax)
    if consumer.kernel.params.overlap == 1:
        _wait_for_turn(consumer)
        _start_scores(consumer)
        _start_results(consumer)
        if consumer.kernel.params.pingpong == 1:
            _pass_turn(consumer)
        _finish_scores(consumer, 1)
        if consumer.kernel.params.pingpong == 2:
            _pass_turn(consumer)
        next_softmax(softmax, rows, block, is_masked)
        await_sums(softmax)
        _finish_results(consumer, 0)
    else:
        _wait_for_turn(consumer)
        _start_results(consumer)
        _finish_results(consumer, 0)
        _start_scores(consumer)
        _pass_turn(consumer)
        _finish_scores(consumer, 0)
        next_softmax(softmax, rows, block, is_masked)
    rescale(softmax, consumer.results, consumer.kernel.results)
    to_operand(softmax, consumer.operand)


@T.inline
def _go_through_blocks(consumer, rows, tile):
    """Have a consumer turn the scores of the first block, which is under way, into powers, and go through the others."""
    kernel, softmax = T.meta_var((consumer.kernel, consumer.softmax))
    lower, upper = T.meta_var(kernel.spec.band)
    _finish_scores(consumer, 0)
    first_softmax(softmax, rows, tile.blocks - 1, kernel.has_unseen_keys)
    to_operand(softmax, consumer.operand)
    first_whole, end = meta_vars(tile.whole_blocks(rows.first_row))
    if lower is not None:
        for i in T.serial(tile.blocks - 1 - tile.first):
            block = T.meta_var(tile.blocks - 2 - i)
            _next_block(consumer, rows, block, T.Or(block >= end, block < first_whole))
    elif upper is not None:
        whole: T.let = T.min(tile.blocks - 1, end)
        for i in T.serial(tile.blocks - 1 - whole):
            _next_block(consumer, rows, tile.blocks - 2 - i, True)
        for i in T.serial(whole):
            _next_block(consumer, rows, whole - 1 - i, False)
    else:
        for i in T.serial(tile.blocks - 1):
            _next_block(consumer, rows, tile.blocks - 2 - i, False)


@T.inline
def _take_block(consumer, rows, block, whole):
    """Turn scores that are there into powers while products go on, wait for the results before them, and make the powers an operand.

    `whole` is the first block that needs no mask, and the one after the last.
    """
    softmax = T.meta_var(consumer.softmax)
    lower, upper = T.meta_var(consumer.kernel.spec.band)
    first_whole, end = meta_vars(whole)
    if lower is not None:
        next_softmax(softmax, rows, block, T.Or(block >= end, block < first_whole))
    elif upper is not None:
        next_softmax(softmax, rows, block, block >= end)
    else:
        next_softmax(softmax, rows, block, False)
    await_sums(softmax)


@T.inline
def _next_of_two(now, after, rows, block, whole):
    """Take a block whose scores are there, during the products of the results before it and of the scores after it."""
    _start_scores(after)
    _start_results(now)
    _take_block(now, rows, block, whole)
    _finish_scores(after, 1)
    _finish_results(now, 0)
    rescale(now.softmax, now.results, now.kernel.results)
    to_operand(now.softmax, now.operand)


@T.inline
def _last_of_two(now, rows, block, whole):
    """Take the last block."""
    _start_results(now)
    _take_block(now, rows, block, whole)
    _finish_results(now, 0)
    rescale(now.softmax, now.results, now.kernel.results)
    to_operand(now.softmax, now.operand)


@T.inline
def _go_through_two_ahead(consumer, rows, tile):
    """Do what `_go_through_blocks` does, with the next block's scores under way, in other registers than this block's."""
    kernel = T.meta_var(consumer.kernel)
    other = T.meta_var(consumer.with_other_scores())
    first_whole, stop = meta_vars(tile.whole_blocks(rows.first_row))
    end: T.let = stop
    whole = T.meta_var((first_whole, end))
    _finish_scores(consumer, 0)
    if tile.blocks - tile.first == 1:
        first_softmax(consumer.softmax, rows, tile.blocks - 1, kernel.has_unseen_keys)
        to_operand(consumer.softmax, consumer.operand)
    else:
        _start_scores(other)
        first_softmax(consumer.softmax, rows, tile.blocks - 1, kernel.has_unseen_keys)
        await_sums(consumer.softmax)
        _finish_scores(other, 0)
        to_operand(consumer.softmax, consumer.operand)
        between: T.let = tile.blocks - tile.first - 2
        for i in T.serial(between // 2):
            _next_of_two(other, consumer, rows, tile.blocks - 2 - i * 2, whole)
            _next_of_two(consumer, other, rows, tile.blocks - 3 - i * 2, whole)
        if between % 2 == 1:
            _next_of_two(other, consumer, rows, tile.first + 1, whole)
            _last_of_two(consumer, rows, tile.first, whole)
        else:
            _last_of_two(other, rows, tile.first, whole)


@T.inline
def _process_tile(consumer, store_map, tile, is_first):
    """Have a consumer go through the blocks of keys that its rows see, from the last to the first, and store its results."""
    kernel, softmax = T.meta_var((consumer.kernel, consumer.softmax))
    q_state = T.meta_var(consumer.states[0])
    first_row = T.meta_var(tile.row + consumer.index * MMA_TILE_ROWS)
    rows = T.meta_var(Rows(kernel, tile, first_row, consumer.lanes))
    for i in T.unroll(kernel.results):
        consumer.results[i] = T.float32(0)
    consumer.smem.q_full.wait(q_state.stage * kernel.params.consumers + consumer.index, q_state.phase)
    _start_scores(consumer)
    if kernel.params.q_stages == 2:
        if T.Not(is_first):
            give_back_queries(consumer, 1 - q_state.stage)
    if kernel.params.overlap == 2:
        _go_through_two_ahead(consumer, rows, tile)
    else:
        _go_through_blocks(consumer, rows, tile)
    _start_results(consumer)
    finish_rows(softmax)
    if kernel.spec.has_logsumexp:
        store_sums(softmax, kernel.argument("logsumexp"), tile, first_row, consumer.lanes)
    if kernel.is_float8:
        scale_results(softmax)
    _finish_results(consumer, 0)
    store_results(consumer, store_map, tile)


@T.inline
def consume(kernel, smem, store_map, cta, place):
    """Have a consumer warpgroup compute its rows of tile after tile."""
    params = T.meta_var(kernel.params)
    index, warp, lane = meta_vars(place)
    scores = T.alloc_local((kernel.scores,), "float32")
    other_scores = T.meta_var(T.alloc_local((kernel.scores,), "float32") if params.overlap == 2 else None)
    results = T.alloc_local((kernel.results,), "float32")
    operand = T.alloc_local((kernel.operands,), "uint32")
    reference = T.alloc_local((2,), "float32")
    total = T.alloc_local((4,), "float32")
    factor = T.alloc_local((2,), "float32")
    partial = T.alloc_local((4,), "float32")
    grows = T.alloc_local((1,), "int32")
    scales = T.meta_var(T.alloc_local((3,), "float32") if kernel.is_float8 else None)
    softmax = T.meta_var(Softmax(kernel, scores, reference, total, factor, partial, grows, scales))
    if kernel.is_float8:
        load_scales(softmax)
    q = T.uint64(0)
    k = T.uint64(0)
    v = T.uint64(0)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(q), smem.q.ptr_to([index, 0]), *kernel.rows_descriptor)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(k), smem.k.ptr_to([0, 0]), *kernel.rows_descriptor)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(v), smem.v.ptr_to([0, 0]), *kernel.values_descriptor)
    q_state = PipelineState(params.q_stages, 0)
    k_state = PipelineState(params.stages, 0)
    v_state = PipelineState(params.stages, 0)
    consumer = T.meta_var(
        Consumer(
            kernel=kernel,
            smem=smem,
            softmax=softmax,
            results=results,
            operand=operand,
            descriptors=(q, k, v),
            states=(q_state, k_state, v_state),
            index=index,
            lanes=(warp, lane),
            other_scores=other_scores,
        )
    )
    if index == params.consumers - 1:
        _pass_turn(consumer)
    for wave in T.serial(kernel.waves):
        tile = Tile(kernel, cta, wave)
        if tile.exists():
            _process_tile(consumer, store_map, tile, wave == 0)
    if index == 0:
        _wait_for_turn(consumer)
    if (warp == 0) & (lane == 0):
        T.ptx.cp.async_.bulk.wait_group(0)
