"""Owns how a consumer stores its accumulators: by stmatrix to shared memory and from there by TMA or in whole lines, or thread by thread.

Knows nothing of operands, pipelines or how tiles are chosen, nor of what an element is, which is `epilogue`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.hopper.accumulators import AccumulatorLayout
from kerneldecl.templates.hopper.copy_out import copy_out, smem_place
from kerneldecl.templates.hopper.epilogue import Epilogue, meta_vars
from kerneldecl.templates.hopper.kernel_config import LINE_BLOCKS, EpiloguePlan
from kerneldecl.templates.hopper.tma import LOAD

TMA_STORE = "cp.async.bulk.tensor.{}d.global.shared::cta.bulk_group"
STMATRIX = "stmatrix.sync.aligned.m8n8.x{}{}.shared.b16"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x{}{}.shared.b16"
EXCHANGE = "kd_exchange_rows"
EXCHANGE_SOURCE = """
template <class X>
__device__ __forceinline__ void kd_exchange_by(int lane, int by, X& a, X& b) {
  X got = __shfl_xor_sync(0xffffffffu, lane & by ? a : b, by);
  if (lane & by) a = got; else b = got;
}
// Quads are rows: afterwards value i of a quad's thread is what the quad of row i had as the value of this quad's number.
template <class X>
__device__ __forceinline__ void kd_exchange_rows(int lane, X& a, X& b, X& c, X& d, X& e, X& f, X& g, X& h) {
  kd_exchange_by(lane, 4, a, b); kd_exchange_by(lane, 4, c, d); kd_exchange_by(lane, 4, e, f); kd_exchange_by(lane, 4, g, h);
  kd_exchange_by(lane, 8, a, c); kd_exchange_by(lane, 8, b, d); kd_exchange_by(lane, 8, e, g); kd_exchange_by(lane, 8, f, h);
  kd_exchange_by(lane, 16, a, e); kd_exchange_by(lane, 16, b, f); kd_exchange_by(lane, 16, c, g); kd_exchange_by(lane, 16, d, h);
}
"""


class TileOperandLoads(NamedTuple):
    """What a consumer has TMA load a tile operand with."""

    map: Any
    """Its tensor map, a variable of the kernel."""
    barrier: Any
    """Barriers of the consumers, which count the bytes."""
    state: Any
    """Phase of the consumer's barrier."""
    values: Any
    """The registers of stmatrix as elements."""


class StoreContext(NamedTuple):
    """What a consumer stores with, while a kernel's script is read."""

    plan: EpiloguePlan
    acc: Any
    """Registers of accumulators."""
    aux: Sequence[Any]
    """Registers of auxiliary operands, a buffer for each."""
    packed: Any
    """Four registers for stmatrix."""
    staging: Any
    """Shared memory: a consumer's buffers of chunks."""
    map: Any
    """The result's tensor map, a variable of the kernel."""
    lanes: tuple[Any, Any]
    """Warp of the warpgroup, lane."""
    tile_operand: TileOperandLoads | None = None

    @property
    def epilogue(self) -> Epilogue:
        return self.plan.epilogue

    def corner(self, chunk: Any, row: Any, column: Any) -> tuple[Any, Any]:
        """Return where a chunk of a consumer's accumulators begins: in its first MMA tile, from its first columns on."""
        accumulators = self.plan.chunk_accumulators
        per_mma_tile = self.plan.accum.per_mma_tile // accumulators
        return row + chunk // per_mma_tile * MMA_TILE_ROWS, column + chunk % per_mma_tile * (accumulators * 2)

    def first_aux(self, chunk: Any) -> Any:
        """Return where a chunk's auxiliary operands begin in their registers."""
        return chunk % self.plan.aux_buffers * self.plan.chunk_accumulators

    def aux_values(self, at: Any, streamed_at: Any) -> list[Any]:
        """Return the auxiliary operands' values in registers; the tile operand's are in those of stmatrix."""
        streamed = [self.tile_operand.values[streamed_at]] if self.tile_operand is not None else []
        return [aux[at] for aux in self.aux] + streamed


class StagingChunk:
    """A chunk of the staging buffers."""

    def __init__(self, staging: Any, consumer: Any, buffer: Any) -> None:
        self._staging, self._place = staging, (consumer, buffer)

    def ptr_to(self, index: list[Any]) -> Any:
        return self._staging.ptr_to([*self._place, *index])

    def __getitem__(self, index: Any) -> Any:
        return self._staging[(*self._place, index)]


class Accumulators:
    """A thread's accumulators from one of its MMA tiles on, in their own dtype."""

    def __init__(self, layout: AccumulatorLayout, registers: Any, mma_tile: Any) -> None:
        self._first, self._per_register = mma_tile * layout.per_mma_tile, layout.per_register
        self._registers, self._accumulators = registers, layout.of_registers(registers)

    def __getitem__(self, index: Any) -> Any:
        return self._accumulators[self._first + index]

    def pair(self, index: Any) -> Any:
        """Return the register that two neighbours share, the first at an even place; None where each has one of its own."""
        return self._registers[(self._first + index) // 2] if self._per_register == 2 else None


class GatedAccumulators:
    """A thread's results of two accumulators each, from one of its MMA tiles on: 8 columns of one half, then those of the other."""

    def __init__(self, plan: EpiloguePlan, registers: Any, mma_tile: Any) -> None:
        assert plan.gate is not None
        self._first, self._registers, self._gate = mma_tile * plan.accum.per_mma_tile, registers, plan.gate

    def __getitem__(self, index: Any) -> Any:
        result = self._first + index
        first = result // 4 * 8 + result % 4
        return self._gate(self._registers[first], self._registers[first + 4])

    def pair(self, index: Any) -> Any:
        """Return None: no register holds two results."""
        del index


def accumulators(plan: EpiloguePlan, registers: Any, mma_tile: Any) -> Accumulators | GatedAccumulators:
    """Return a thread's results before the epilogue, from one of its MMA tiles on."""
    return Accumulators(plan.accum, registers, mma_tile) if plan.gate is None else GatedAccumulators(plan, registers, mma_tile)


def keep(buffers: Sequence[Any], at: Any, values: Sequence[Any]) -> None:
    """Store values at one place, each in its buffer."""
    for buffer, value in zip(buffers, values, strict=True):
        T.buffer_store(buffer, value, [at])


@T.inline
def load_aux(context, chunk, at):
    """Have a warpgroup load the auxiliary operands of a chunk, all at once and in the order in which `_fill` takes them."""
    batch, first_row, first_column, _ = meta_vars(at)
    row, column = meta_vars(context.corner(chunk, first_row, first_column))
    first = T.meta_var(context.first_aux(chunk))
    warp, lane = meta_vars(context.lanes)
    epilogue = T.meta_var(context.epilogue)
    for number in T.unroll(epilogue.chunk_elements // 256):
        x = T.meta_var(row + warp * 16 + number % 2 * 8 + lane // 4)
        y = T.meta_var(column + number // 2 * 8 + (lane % 4) * 2)
        if epilogue.in_pairs and not epilogue.is_swapped:
            for v in T.vectorized(2):
                keep(context.aux, first + number * 2 + v, epilogue.aux(batch, x, y + v))
        else:
            for v in T.unroll(2):
                keep(context.aux, first + number * 2 + v, epilogue.aux(batch, x, y + v))


@T.inline
def load_tile_operand(context, at):
    """Have a warpgroup's first thread start the loads of its part of the tile operand, chunk by chunk, where their results will be.

    `at` is the batch, row, column and consumer. The buffers are free as soon as TMA has read what it stores from them.
    """
    epilogue, loads, consumer = T.meta_var((context.epilogue, context.tile_operand, at[3]))
    batch, row, column, _ = meta_vars(at)
    if (context.lanes[0] == 0) & (context.lanes[1] == 0):
        T.ptx.cp.async_.bulk.wait_group.read(0)
        loads.barrier.arrive(consumer, context.plan.streamed_bytes)
        for chunk in T.unroll(context.plan.chunks):
            x, y = meta_vars(context.corner(chunk, row, column))
            T.ptx[LOAD.format(epilogue.map.rank, "")](
                context.staging.ptr_to([consumer, chunk, 0]),
                T.address_of(loads.map),
                *epilogue.coords(batch, x, y),
                loads.barrier.ptr_to([consumer]),
            )


@T.inline
def _wait_for_buffer(context, chunk, consumer):
    """Have a warpgroup wait until it may write a chunk: TMA has read what was there, or loaded the tile operand."""
    loads = T.meta_var(context.tile_operand)
    if loads is not None:
        if chunk == 0:
            loads.barrier.wait(consumer, loads.state.phase)
            loads.state.advance()
    else:
        if context.epilogue.map is not None:
            if (context.lanes[0] == 0) & (context.lanes[1] == 0):
                T.ptx.cp.async_.bulk.wait_group.read(context.plan.buffers - 1)
        T.cuda.warpgroup_sync(1 + consumer)


@T.inline
def _fill(context, acc, buffer, chunk, at):
    """Have a warpgroup write a chunk of results to shared memory; `at` is its batch, row and column."""
    first, first_aux = T.meta_var((chunk * context.plan.chunk_accumulators, context.first_aux(chunk)))
    batch, row, column = meta_vars(at)
    warp, lane = meta_vars(context.lanes)
    epilogue, packed = T.meta_var((context.epilogue, context.packed))
    columns = T.meta_var(epilogue.lines if epilogue.is_swapped else epilogue.width)
    trans = T.meta_var(".trans" if epilogue.is_swapped else "")
    count = T.meta_var(4 if columns % 16 == 0 else 2)
    for j in T.unroll(columns // (4 * count)):
        matrix = T.meta_var(lane // 8)
        block_of_matrix = T.meta_var(j * (count // 2) + matrix // 2 % (count // 2))
        place = T.meta_var(
            smem_place(epilogue, block_of_matrix * 8 + lane % 8, warp * 2 + matrix % 2)
            if epilogue.is_swapped
            else smem_place(epilogue, warp * 16 + lane % 16, block_of_matrix)
        )
        if epilogue.is_streaming:
            T.ptx[LDMATRIX.format(count, trans)](*[packed[q] for q in range(count)], buffer.ptr_to([place]))
        for q in T.unroll(count):
            half = T.meta_var(q % 2)
            block = T.meta_var(j * (count // 2) + q // 2)
            i = T.meta_var(first + block * 4 + half * 2)
            x = T.meta_var(row + warp * 16 + half * 8 + lane // 4)
            y = T.meta_var(column + block * 8 + (lane % 4) * 2)
            if acc.pair(i) is not None and epilogue.is_identity(acc[i]):
                packed[q] = acc.pair(i)
            else:
                T.ptx[f"cvt.rn.{'bf16' if epilogue.dtype == 'bfloat16' else 'f16'}x2.f32"](
                    packed[q],
                    epilogue.value_float32(acc[i + 1], (batch, x, y + 1), context.aux_values(i - first + first_aux + 1, q * 2 + 1)),
                    epilogue.value_float32(acc[i], (batch, x, y), context.aux_values(i - first + first_aux, q * 2)),
                )
        T.ptx[STMATRIX.format(count, trans)](buffer.ptr_to([place]), *[packed[q] for q in range(count)])


@T.inline
def _store_lines(context, mma_tile, at):
    """Have warps store results of an MMA tile, 32 columns of 8 rows at once: threads exchange them, so that a store is of one row."""
    acc = T.meta_var(accumulators(context.plan, context.acc, mma_tile))
    batch, row, column = meta_vars(at)
    warp, lane = meta_vars(context.lanes)
    epilogue = T.meta_var(context.epilogue)
    values = T.alloc_local((LINE_BLOCKS * 2,), epilogue.dtype)
    for group in T.unroll(context.plan.line_groups):
        for half in T.unroll(2):
            for i in T.unroll(LINE_BLOCKS * 2):
                block = T.meta_var(group * LINE_BLOCKS + i // 2)
                x = T.meta_var(row + warp * 16 + half * 8 + lane // 4)
                y = T.meta_var(column + block * 8 + (lane % 4) * 2 + i % 2)
                values[i] = epilogue.element(acc[block * 4 + half * 2 + i % 2], batch, x, y)
            T.cuda.func_call(EXCHANGE, lane, *[values[i] for i in range(LINE_BLOCKS * 2)], source_code=EXCHANGE_SOURCE)
            for i in T.unroll(LINE_BLOCKS * 2):
                x = T.meta_var(row + warp * 16 + half * 8 + i)
                y = T.meta_var(column + group * (LINE_BLOCKS * 8) + lane // 8 * 8 + (lane % 4) * 2 + lane // 4 % 2)
                if epilogue.inside(x, y):
                    epilogue.buffer[tuple(epilogue.index(batch, x, y))] = values[i]


@T.inline
def _store_directly(context, mma_tile, at):
    """Have each thread store those results of an MMA tile that no line has; `at` is the tile's batch, row and column."""
    acc = T.meta_var(accumulators(context.plan, context.acc, mma_tile))
    batch, row, column = meta_vars(at)
    warp, lane = meta_vars(context.lanes)
    epilogue = T.meta_var(context.epilogue)
    first = T.meta_var(context.plan.line_groups * LINE_BLOCKS)
    for block in T.unroll(first, context.plan.accum.per_mma_tile // 4):
        for half in T.unroll(2):
            x = T.meta_var(row + warp * 16 + half * 8 + lane // 4)
            y = T.meta_var(column + block * 8 + (lane % 4) * 2)
            if epilogue.in_pairs and not epilogue.is_swapped:
                if epilogue.inside(x, y):
                    for v in T.vectorized(2):
                        epilogue.buffer[tuple(epilogue.index(batch, x, y + v))] = epilogue.element(
                            acc[block * 4 + half * 2 + v], batch, x, y + v
                        )
            else:
                for v in T.unroll(2):
                    yv = T.meta_var(column + block * 8 + (lane % 4) * 2 + v)
                    if epilogue.inside(x, yv):
                        epilogue.buffer[tuple(epilogue.index(batch, x, yv))] = epilogue.element(acc[block * 4 + half * 2 + v], batch, x, yv)


@T.inline
def store_chunks(context, at, begin, end):
    """Have a warpgroup store some chunks of its accumulators through shared memory, in its buffers by turns.

    `at` is the batch, row, column and consumer. With double buffering the first chunk's auxiliary operands are loaded before.
    """
    epilogue, staging = T.meta_var((context.epilogue, context.staging))
    batch, row, column, consumer = meta_vars(at)
    warp, lane = meta_vars(context.lanes)
    buffers = T.meta_var(context.plan.buffers)
    acc = T.meta_var(accumulators(context.plan, context.acc, 0))
    for number in T.unroll(end - begin):
        chunk = T.meta_var(begin + number)
        buffer = T.meta_var(chunk % buffers)
        x, y = meta_vars(context.corner(chunk, row, column))
        if context.plan.aux_buffers == 2:
            if chunk + 1 < context.plan.chunks:
                load_aux(context, chunk + 1, at)
        else:
            load_aux(context, chunk, at)
        _wait_for_buffer(context, chunk, consumer)
        _fill(context, acc, StagingChunk(staging, consumer, buffer), chunk, (batch, x, y))
        if epilogue.map is not None:
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.warpgroup_sync(1 + consumer)
            if (warp == 0) & (lane == 0):
                T.ptx[TMA_STORE.format(epilogue.map.rank)](
                    T.address_of(context.map), *epilogue.coords(batch, x, y), staging.ptr_to([consumer, buffer, 0])
                )
                T.ptx.cp.async_.bulk.commit_group()
        else:
            T.cuda.warpgroup_sync(1 + consumer)
            copy_out(epilogue, StagingChunk(staging, consumer, buffer), (batch, x, y), context.lanes)


@T.inline
def store_tile(context, at):
    """Have a warpgroup store its accumulators as results; `at` is the batch, row, column and consumer."""
    if context.plan.buffers > 0:
        store_chunks(context, at, 0, context.plan.chunks)
    else:
        batch, row, column, _ = meta_vars(at)
        for s in T.unroll(context.plan.accum.mma_tiles):
            if context.plan.line_groups > 0:
                _store_lines(context, s, (batch, row + s * MMA_TILE_ROWS, column))
            _store_directly(context, s, (batch, row + s * MMA_TILE_ROWS, column))


@T.inline
def wait_for_stores(plan, is_first_thread):
    """Have a warpgroup's first thread, which starts TMA stores, wait until they are done: shared memory must stay until then."""
    if plan.stores_by_tma:
        if is_first_thread:
            T.ptx.cp.async_.bulk.wait_group(0)
