"""Owns the TIRx kernel of a grouped GEMM on wgmma: shared memory, barriers, who is producer and who consumer.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.templates.gpu.attention_decode_combine import meet
from kerneldecl.templates.hopper.consumer import Consumer, CtaRank, release
from kerneldecl.templates.hopper.cta import Ids, Smem
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.grouped_config import GroupedKernel
from kerneldecl.templates.hopper.grouped_scales import Scales, run_scaled
from kerneldecl.templates.hopper.grouped_scheduler import GroupedScheduler, Tables, fill_tables
from kerneldecl.templates.hopper.grouped_store import store_rows, store_zeros
from kerneldecl.templates.hopper.mainloop import finish_mainloop, run_mainloop
from kerneldecl.templates.hopper.store import StoreContext, wait_for_stores
from kerneldecl.templates.hopper.tma import ENCODE, TmaLoader, load_tile
from kerneldecl.templates.hopper.turns import skip, wait_for_turn


class Cta(NamedTuple):
    """What all warps of a CTA know, while the kernel's script is read."""

    kernel: GroupedKernel
    maps: tuple[Any, Any, Any]
    """Tensor maps of A, B and C."""
    smem: Smem
    tables: Tables
    ids: Ids

    @property
    def first(self) -> Any:
        """Return the first tile of the CTA's cluster."""
        return self.ids.block // self.kernel.params.cluster_n

    def scheduler(self) -> GroupedScheduler:
        return GroupedScheduler(self.kernel, self.tables, self.first)

    def scheduler_of(self, consumer: Any) -> GroupedScheduler:
        """Return the tiles of a consumer: those of the cluster, or every second one of them."""
        if not self.kernel.gemm.params.is_pingpong:
            return self.scheduler()
        return GroupedScheduler(self.kernel, self.tables, self.first + consumer * self.kernel.clusters, turns=2)

    def column(self, scheduler: GroupedScheduler) -> Any:
        """Return the first column of the CTA's tile."""
        params = self.kernel.params
        return (scheduler.column * params.cluster_n + self.ids.rank) * params.block_n

    def loaders(self) -> tuple[TmaLoader, TmaLoader]:
        """Return how TMA loads A, which CTAs of a cluster share, and B."""
        gemm, params = self.kernel.gemm, self.kernel.params
        mask = T.uint16((1 << params.cluster_n) - 1) if params.cluster_n > 1 else None
        return TmaLoader(gemm.a, self.maps[0], self.smem.a, self.ids.rank, mask=mask), TmaLoader(gemm.b, self.maps[1], self.smem.b, 0)


@T.inline
def _produce(cta):
    """Have one thread load the k-tiles of the cluster's tiles; those of rows of no group have none."""
    gemm, full, empty = T.meta_var((cta.kernel.gemm, cta.smem.full, cta.smem.empty))
    state = PipelineState(gemm.params.stages, 1)
    a, b = meta_vars(cta.loaders())
    scheduler = cta.scheduler()
    while scheduler.valid():
        if scheduler.is_of_group():
            for i in T.serial(gemm.k_tiles):
                empty.wait(state.stage, state.phase)
                full.arrive(state.stage, gemm.stage_bytes)
                barrier = T.meta_var(full.ptr_to([state.stage]))
                load_tile(a, scheduler.row, (0, i), state.stage, barrier)
                load_tile(b, cta.column(scheduler), (scheduler.segment, i), state.stage, barrier)
                state.advance()
        scheduler.advance()


@T.inline
def _pass_over(consumer, k_tiles):
    """Have a consumer none of whose rows are the group's give stages back as they are filled."""
    for _ in T.serial(k_tiles):
        consumer.barriers.full.wait(consumer.state.stage, consumer.state.phase)
        release(consumer, consumer.state.stage)
        consumer.state.advance()


def _upper(consumer: Consumer) -> Consumer | None:
    """Return a consumer that multiplies the first of its two MMA tiles alone, where the second one's rows are not the group's."""
    gemm, rows = consumer.kernel, MMA_TILE_ROWS * consumer.kernel.params.consumers_per_tile
    if gemm.params.mma_tiles < 2 or not gemm.params.is_pingpong:
        return None
    return consumer._replace(kernel=replace(gemm, params=gemm.params._replace(block_m=rows)))


@T.inline
def _multiply(consumer, scheduler, column):
    """Multiply the k-tiles of a tile, and find the next one meanwhile."""
    run_mainloop(consumer, consumer.kernel.k_tiles, (column, 0))
    scheduler.advance()
    finish_mainloop(consumer)


@T.inline
def _take_tile(cta, consumer, context, others, scheduler):
    """Have a consumer multiply its rows of a tile and store the results; the next tile is found while the last MMAs are under way."""
    kernel, gemm, index = T.meta_var((cta.kernel, cta.kernel.gemm, consumer.index))
    scales, out = meta_vars(others)
    upper = T.meta_var(_upper(consumer))
    # What is known of this tile is kept until its results are stored.
    row: T.let = scheduler.row + consumer.first_row
    column: T.let = cta.column(scheduler)
    end: T.let = scheduler.end
    group: T.let = scheduler.segment
    if group >= kernel.spec.groups:
        scheduler.advance()
        store_zeros(kernel, out, (row, column, consumer.warp * 32 + consumer.lane), end)
    elif row >= end:
        _pass_over(consumer, gemm.k_tiles)
        scheduler.advance()
    else:
        if kernel.spec.is_scaled:
            run_scaled(kernel, consumer, scales, (group, row, column))
            scheduler.advance()
        elif upper is None:
            _multiply(consumer, scheduler, column)
        elif row + MMA_TILE_ROWS >= end:
            _multiply(upper, scheduler, column)
        else:
            _multiply(consumer, scheduler, column)
        store_rows(context, (row, column, index), end)


@T.inline
def _consume(cta, out, index):
    """Have a consumer warpgroup multiply its rows of the cluster's tiles and store the results."""
    kernel, gemm, smem = T.meta_var((cta.kernel, cta.kernel.gemm, cta.smem))
    warp, lane = meta_vars((cta.ids.warp, cta.ids.lane))
    acc = T.alloc_local((gemm.accum.registers,), gemm.accum.register_dtype)
    packed = T.alloc_local((4,), "uint32")
    a_descriptor = T.uint64(0)
    b_descriptor = T.uint64(0)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(a_descriptor), smem.a.ptr_to([0, 0]), *gemm.a.descriptor)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(b_descriptor), smem.b.ptr_to([0, 0]), *gemm.b.descriptor)
    state = PipelineState(gemm.params.stages, 0)
    consumer = T.meta_var(
        Consumer(
            kernel=gemm,
            acc=acc,
            descriptors=(a_descriptor, b_descriptor),
            state=state,
            barriers=smem,
            index=index,
            lane=lane,
            rank=CtaRank(m=0, n=cta.ids.rank, split=0),
            fragments=None,
            warp=warp,
        )
    )
    context = T.meta_var(
        StoreContext(plan=gemm.epilogue_plan, acc=acc, aux=[], packed=packed, staging=smem.staging, map=cta.maps[2], lanes=(warp, lane))
    )
    scales = T.meta_var(Scales.of(kernel) if kernel.spec.is_scaled else None)
    scheduler = cta.scheduler_of(index)
    # Staggered, the first consumer never waits.
    phase = 1 - index
    if gemm.params.is_pingpong:
        skip(gemm, state, index * gemm.k_tiles)
    while scheduler.valid():
        # Tiles of rows of no group are the last ones: nobody waits for a turn behind them.
        if not gemm.params.is_cooperative:
            if scheduler.is_of_group():
                wait_for_turn(gemm, smem.order, index, phase)
        _take_tile(cta, consumer, context, (scales, out), scheduler)
        if gemm.params.is_pingpong:
            skip(gemm, state, gemm.k_tiles)
    wait_for_stores(gemm.epilogue_plan, (warp == 0) & (lane == 0))


@T.inline
def _run(kernel, maps, args, ids):
    """Have a CTA find where groups lie, and take its tiles: the first warpgroup is the producer, the others are consumers."""
    gemm, params, plan = T.meta_var((kernel.gemm, kernel.gemm.params, kernel.gemm.epilogue_plan))
    sizes, out = meta_vars(args)
    group, warp, lane = meta_vars((ids.warpgroup, ids.warp, ids.lane))
    pool = T.SMEMPool()
    a_stages = pool.alloc((params.stages, gemm.a.stage_elements), gemm.a.dtype, align=1024)
    b_stages = pool.alloc((params.stages, gemm.b.stage_elements), gemm.b.dtype, align=1024)
    staging_shape = T.meta_var((params.consumers, *plan.staging_shape))
    # Both stages are of whole 1024 bytes, so the staging buffers begin where they end; there numbers are added up before.
    scratch = T.meta_var(pool.offset)
    staging = pool.alloc(staging_shape, plan.epilogue.dtype, align=1024)
    full = TMABar(pool, params.stages)
    empty = MBarrier(pool, params.stages)
    order = MBarrier(pool, 2) if not gemm.params.is_cooperative else T.meta_var(None)
    tables = T.meta_var(Tables.of(pool, kernel, scratch))
    pool.commit()
    smem = T.meta_var(
        Smem(
            a=a_stages,
            b=b_stages,
            staging=staging,
            partials=None,
            scales=None,
            zeros=None,
            full=full,
            empty=empty,
            order=order,
            tile_operand=None,
        )
    )
    full.init(1)
    empty.init(gemm.params.consumers_per_tile * 4 * params.cluster_n)
    if not gemm.params.is_cooperative:
        order.init(4)
    T.ptx.fence.mbarrier_init.release.cluster()
    meet(params.cluster_n)
    # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
    T.ptx.griddepcontrol.launch_dependents()
    T.ptx.griddepcontrol.wait()
    fill_tables(kernel, tables, sizes, group * 128 + warp * 32 + lane)
    cta = T.meta_var(Cta(kernel=kernel, maps=maps, smem=smem, tables=tables, ids=ids))
    producer_registers, consumer_registers = meta_vars(gemm.maxnreg)
    if group == 0:
        if producer_registers > 0:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(producer_registers)
        if warp == 0:
            if T.cuda.elect_sync():
                _produce(cta)
            T.cuda.warp_sync()
    else:
        if consumer_registers > 0:
            T.ptx.setmaxnreg.inc.sync.aligned.u32(consumer_registers)
        index: T.let = group - 1
        _consume(cta, out, index)
    if params.cluster_n > 1:
        # No CTA leaves while others still write to its stages or arrive at its barriers.
        meet(params.cluster_n)


def build(kernel: GroupedKernel) -> tvm.IRModule:
    """Return a module whose `main` is the grouped GEMM."""
    gemm, params, spec = kernel.gemm, kernel.params, kernel.spec
    sizes, c = kernel.buffers["counts" if spec.is_masked else "offsets"], kernel.buffers["C"]

    @T.prim_func(check_well_formed=False)
    def main():
        rows_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, rows_map, gemm.a.dtype, *gemm.a.tma.map.args)
        columns_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, columns_map, gemm.b.dtype, *gemm.b.tma.map.args)
        store_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, store_map, spec.out_dtype, *gemm.epilogue.map.args)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([params.cluster_n])
        block = T.cta_id([kernel.clusters * params.cluster_n])
        group = T.warpgroup_id([params.consumers + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        flat = T.decl_buffer((spec.places * spec.n,), spec.out_dtype, data=c.data)
        ids = T.meta_var(Ids(rank=rank, block=block, warpgroup=group, warp=warp, lane=lane))
        _run(kernel, (rows_map, columns_map, store_map), (sizes, flat), ids)

    func = tirx.PrimFunc(list(kernel.buffers.values()), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
