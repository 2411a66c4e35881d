"""Owns the TIRx kernel of attention on wgmma: a producer warp loads blocks of keys and values, consumer warpgroups go through them.

Knows nothing of how its parameters are chosen. The names of steps follow Shah et al., FlashAttention-3, 2024.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
from tvm.script import tirx as T

from kerneldecl.analysis.attention import CHUNK, ITEM_BYTES
from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.hopper.attention_config import AttentionKernel
from kerneldecl.templates.hopper.attention_softmax import Softmax, await_sums, finish_rows, first_softmax, next_softmax, rescale, to_operand
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.mainloop import FENCE_SOURCE
from kerneldecl.templates.hopper.store import STMATRIX, TMA_STORE
from kerneldecl.templates.hopper.tma import ENCODE, LOAD

CONSUMER_BARRIER = 1
"""First of the named barriers at which a consumer's warps meet."""
TURN_BARRIER = 5
"""First of the named barriers at which consumers wait for their turn."""


class Smem(NamedTuple):
    """Shared memory of a CTA, and its barriers."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    """One for each consumer's rows in each stage, like `q_empty`."""
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


@T.meta_class
class Tile:
    """The tile of a CTA in one wave: which head, which rows, how many blocks of keys they see."""

    def __init__(self, kernel: AttentionKernel, cta: Any, wave: Any) -> None:
        self.kernel = kernel
        self.linear = T.local_scalar("int32")
        self.batch = T.local_scalar("int32")
        self.head = T.local_scalar("int32")
        self.row = T.local_scalar("int32")
        self.blocks = T.local_scalar("int32")
        self._place(cta, wave)

    @T.inline
    def _place(self, cta, wave):
        kernel, spec, params = T.meta_var((self.kernel, self.kernel.spec, self.kernel.params))
        rows, together = T.meta_var((kernel.row_tiles, kernel.heads_together))
        # Every other wave goes backwards, so that the CTA with the longest tile of one has the shortest of the next.
        self.linear = wave * kernel.ctas + T.Select(wave % 2 == 0, cta, kernel.ctas - 1 - cta)
        first = T.meta_var(self.linear // (rows * together) * together)
        size = T.meta_var(together if kernel.all_heads % together == 0 else T.min(together, kernel.all_heads - first))
        place = T.meta_var(self.linear % (rows * together))
        tile = T.meta_var(place // size)
        flat = T.meta_var(first + place % size)
        self.head = flat % spec.heads
        self.batch = flat // spec.heads
        self.row = (rows - 1 - tile if spec.is_causal else tile) * params.block_m
        if spec.is_causal:
            last = T.meta_var(T.min(self.row + params.block_m, spec.queries) + spec.diagonal)
            self.blocks = T.max(1, (T.min(last, spec.keys) + params.block_n - 1) // params.block_n)
        else:
            self.blocks = kernel.key_blocks

    def exists(self) -> Any:
        return self.linear < self.kernel.tiles

    def whole_blocks(self, first_row: Any) -> Any:
        """Return how many blocks of keys are seen whole by all rows from one on."""
        spec, block_n = self.kernel.spec, self.kernel.params.block_n
        whole = spec.keys // block_n
        return T.min(whole, T.max(0, first_row + spec.diagonal + 1) // block_n) if spec.is_causal else whole


@T.inline
def _load_boxes(stage, tensor_map, barrier, at, chunk_elements):
    """Have one thread start the loads of a tile's chunks; `at` is the row, head and batch."""
    buffer, index, count = meta_vars(stage)
    row, head, batch = meta_vars(at)
    for chunk in T.unroll(count):
        T.ptx[LOAD.format(4, "")](
            buffer.ptr_to([index, chunk * chunk_elements]), T.address_of(tensor_map), chunk * CHUNK, row, head, batch, barrier
        )


@T.inline
def _load_rows(kernel, ring, tensor_map, state, at):
    """Have one thread load a block of keys or values once its stage is free; `ring` is the stages, their barriers and chunks."""
    buffer, full, empty, count = meta_vars(ring)
    elements = T.meta_var(kernel.params.block_n * CHUNK)
    empty.wait(state.stage, state.phase)
    full.arrive(state.stage, count * elements * ITEM_BYTES)
    _load_boxes((buffer, state.stage, count), tensor_map, full.ptr_to([state.stage]), at, elements)
    state.advance()


@T.inline
def _load_queries(kernel, smem, tensor_map, state, tile):
    """Have one thread load each consumer's rows of queries once its results have left their place."""
    consumers = T.meta_var(kernel.params.consumers)
    for consumer in T.unroll(consumers):
        index = T.meta_var(state.stage * consumers + consumer)
        at = T.meta_var((tile.row + consumer * MMA_TILE_ROWS, tile.head, tile.batch))
        smem.q_empty.wait(index, state.phase)
        smem.q_full.arrive(index, kernel.q_elements * ITEM_BYTES)
        _load_boxes((smem.q, index, kernel.qk_chunks), tensor_map, smem.q_full.ptr_to([index]), at, MMA_TILE_ROWS * CHUNK)
    state.advance()


@T.inline
def _produce(kernel, smem, maps, cta):
    """Have one thread load tile after tile: in the order in which consumers take them, keys one block ahead of values."""
    spec, params = T.meta_var((kernel.spec, kernel.params))
    q_map, k_map, v_map = meta_vars(maps[:3])
    q_state = PipelineState(params.q_stages, 1)
    k_state = PipelineState(params.stages, 1)
    v_state = PipelineState(params.stages, 1)
    keys = T.meta_var((smem.k, smem.k_full, smem.k_empty, kernel.qk_chunks))
    values = T.meta_var((smem.v, smem.v_full, smem.v_empty, kernel.v_chunks))
    for wave in T.serial(kernel.waves):
        tile = Tile(kernel, cta, wave)
        if tile.exists():
            kv_head = T.meta_var(tile.head // spec.group)
            _load_queries(kernel, smem, q_map, q_state, tile)
            _load_rows(kernel, keys, k_map, k_state, ((tile.blocks - 1) * params.block_n, kv_head, tile.batch))
            for i in T.serial(tile.blocks - 1):
                row = T.meta_var((tile.blocks - 2 - i) * params.block_n)
                _load_rows(kernel, keys, k_map, k_state, (row, kv_head, tile.batch))
                _load_rows(kernel, values, v_map, v_state, (row + params.block_n, kv_head, tile.batch))
            _load_rows(kernel, values, v_map, v_state, (0, kv_head, tile.batch))


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

    @property
    def scores(self) -> Any:
        return self.softmax.scores


@T.inline
def _fence(registers, count):
    """Keep nvcc from moving accesses to registers across here."""
    for i in T.unroll(count):
        T.cuda.func_call("tvm_wgmma_fence_operand", registers[i], source_code=FENCE_SOURCE)


@T.inline
def _release(consumer, barriers, state):
    """Have each warp give a stage back to the producer, and go on to the next one."""
    if consumer.lanes[1] == 0:
        barriers.arrive(state.stage)
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
            0,
            0,
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
            1,
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
def _finish_results(consumer):
    """Wait for the results, and give the values back."""
    v_state = T.meta_var(consumer.states[2])
    T.ptx.wgmma.wait_group.sync.aligned(0)
    _fence(consumer.results, consumer.kernel.results)
    _release(consumer, consumer.smem.v_empty, v_state)


@T.inline
def _wait_for_turn(consumer):
    if consumer.kernel.params.pingpong == 1:
        T.ptx.bar.sync(T.cast(TURN_BARRIER + consumer.index, "uint32"), T.uint32(256))


@T.inline
def _pass_turn(consumer):
    consumers = T.meta_var(consumer.kernel.params.consumers)
    if consumer.kernel.params.pingpong == 1:
        T.ptx.bar.arrive(T.cast(TURN_BARRIER + (consumer.index + 1) % consumers, "uint32"), T.uint32(256))


@T.inline
def _next_block(consumer, limits, is_masked):
    """Add a block of values to the results, and take the next block of keys' scores; those products overlap with its softmax."""
    softmax = T.meta_var(consumer.softmax)
    if consumer.kernel.params.overlap == 1:
        _wait_for_turn(consumer)
        _start_scores(consumer)
        _start_results(consumer)
        _pass_turn(consumer)
        _finish_scores(consumer, 1)
        next_softmax(softmax, limits, is_masked)
        await_sums(softmax)
        _finish_results(consumer)
    else:
        _wait_for_turn(consumer)
        _start_results(consumer)
        _finish_results(consumer)
        _start_scores(consumer)
        _pass_turn(consumer)
        _finish_scores(consumer, 0)
        next_softmax(softmax, limits, is_masked)
    rescale(softmax, consumer.results, consumer.kernel.results)
    to_operand(softmax, consumer.operand)


@T.inline
def _give_back_queries(consumer, stage):
    """Have the thread that stores results give their place, a stage of queries, back to the producer once they have been read there."""
    place = T.meta_var(stage * consumer.kernel.params.consumers + consumer.index)
    if (consumer.lanes[0] == 0) & (consumer.lanes[1] == 0):
        T.ptx.cp.async_.bulk.wait_group.read(0)
        consumer.smem.q_empty.arrive(place)


@T.inline
def _store_results(consumer, store_map, tile):
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
    for block in T.unroll(-(-kernel.spec.value_dim // 16)):
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
        for chunk in T.unroll(kernel.v_chunks):
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
        _give_back_queries(consumer, q_state.stage)
    q_state.advance()


@T.inline
def _process_tile(consumer, store_map, tile, is_first):
    """Have a consumer go through the blocks of keys that its rows see, from the last to the first, and store its results."""
    kernel, softmax = T.meta_var((consumer.kernel, consumer.softmax))
    q_state = T.meta_var(consumer.states[0])
    first_row = T.meta_var(tile.row + consumer.index * MMA_TILE_ROWS)
    limits = T.meta_var(softmax.limits(first_row, consumer.lanes))
    for i in T.unroll(kernel.results):
        consumer.results[i] = T.float32(0)
    consumer.smem.q_full.wait(q_state.stage * kernel.params.consumers + consumer.index, q_state.phase)
    _start_scores(consumer)
    if kernel.params.q_stages == 2:
        if T.Not(is_first):
            _give_back_queries(consumer, 1 - q_state.stage)
    _finish_scores(consumer, 0)
    first_softmax(softmax, (limits, tile.blocks - 1), kernel.masks_last_block)
    to_operand(softmax, consumer.operand)
    if kernel.spec.is_causal:
        whole: T.let = T.min(tile.blocks - 1, tile.whole_blocks(first_row))
        for i in T.serial(tile.blocks - 1 - whole):
            _next_block(consumer, (limits, tile.blocks - 2 - i), True)
        for _ in T.serial(whole):
            _next_block(consumer, (limits, 0), False)
    else:
        for _ in T.serial(tile.blocks - 1):
            _next_block(consumer, (limits, 0), False)
    _start_results(consumer)
    finish_rows(softmax)
    _finish_results(consumer)
    _store_results(consumer, store_map, tile)


@T.inline
def _consume(kernel, smem, store_map, cta, place):
    """Have a consumer warpgroup compute its rows of tile after tile."""
    params = T.meta_var(kernel.params)
    index, warp, lane = meta_vars(place)
    scores = T.alloc_local((kernel.scores,), "float32")
    results = T.alloc_local((kernel.results,), "float32")
    operand = T.alloc_local((kernel.scores // 2,), "uint32")
    reference = T.alloc_local((2,), "float32")
    total = T.alloc_local((4,), "float32")
    factor = T.alloc_local((2,), "float32")
    partial = T.alloc_local((4,), "float32")
    grows = T.alloc_local((1,), "int32")
    softmax = T.meta_var(Softmax(kernel, scores, reference, total, factor, partial, grows))
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


@T.inline
def _run(kernel, maps, ids):
    """Have a CTA's first warpgroup be the producer, and the others consumers."""
    params = T.meta_var(kernel.params)
    cta, group, warp, lane = meta_vars(ids)
    dtype = T.meta_var(kernel.spec.dtype)
    pool = T.SMEMPool()
    q = pool.alloc((params.q_stages * params.consumers, kernel.q_elements), dtype, align=1024)
    k = pool.alloc((params.stages, kernel.k_elements), dtype, align=1024)
    v = pool.alloc((params.stages, kernel.v_elements), dtype, align=1024)
    q_full = TMABar(pool, params.q_stages * params.consumers)
    q_empty = MBarrier(pool, params.q_stages * params.consumers)
    k_full = TMABar(pool, params.stages)
    k_empty = MBarrier(pool, params.stages)
    v_full = TMABar(pool, params.stages)
    v_empty = MBarrier(pool, params.stages)
    pool.commit()
    smem = T.meta_var(Smem(q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty))
    q_full.init(1)
    q_empty.init(1)
    k_full.init(1)
    k_empty.init(4 * params.consumers)
    v_full.init(1)
    v_empty.init(4 * params.consumers)
    T.ptx.fence.mbarrier_init.release.cluster()
    T.cuda.cta_sync()
    if params.pdl == 1:
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
    producer_registers, consumer_registers = meta_vars(params.maxnreg)
    if group == 0:
        if producer_registers > 0:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(producer_registers)
        if warp == 0:
            if T.cuda.elect_sync():
                _produce(kernel, smem, maps, cta)
            T.cuda.warp_sync()
    else:
        if consumer_registers > 0:
            T.ptx.setmaxnreg.inc.sync.aligned.u32(consumer_registers)
        index: T.let = group - 1
        _consume(kernel, smem, maps[3], cta, (index, warp, lane))


def build(kernel: AttentionKernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the attention's parameters."""
    params = kernel.params
    q_args, k_args, v_args, o_args = (tensor_map.args for tensor_map in kernel.maps)
    dtype = kernel.spec.dtype

    # The names of tensor maps are arguments on the host, and so part of the digest under which measurements are kept.
    @T.prim_func(check_well_formed=False)
    def main():
        queries_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, queries_map, dtype, *q_args)
        keys_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, keys_map, dtype, *k_args)
        values_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, values_map, dtype, *v_args)
        results_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, results_map, dtype, *o_args)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": params.ctas_per_sm})
        if params.pdl == 1:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        cta = T.cta_id([kernel.ctas])
        group = T.warpgroup_id([params.consumers + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        _run(kernel, (queries_map, keys_map, values_map, results_map), (cta, group, warp, lane))

    func = tirx.PrimFunc(list(kernel.func_params), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
