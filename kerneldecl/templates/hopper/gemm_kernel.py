"""Owns the TIRx kernel of a GEMM on wgmma: producer and consumer warpgroups, and the ring of stages between them.

Knows nothing of where operands and results are in memory, which `Operand` and `Epilogue` tell, nor how parameters are chosen.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS, TMA_SMEM_ALIGN_BYTES
from kerneldecl.templates.hopper.cluster_meetings import done_with_stages, leave, meet_as_producer, meet_at_start, meet_before_sending
from kerneldecl.templates.hopper.consumer import Consumer
from kerneldecl.templates.hopper.cta import Cta, Ids, Smem
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.kernel_config import GemmKernel
from kerneldecl.templates.hopper.mainloop import finish_first_mma_tile, finish_mainloop, run_mainloop
from kerneldecl.templates.hopper.operands import Operand
from kerneldecl.templates.hopper.pack import packed
from kerneldecl.templates.hopper.producer import prefetch_k_tiles, produce
from kerneldecl.templates.hopper.split_k import expect_partials, reduce_partials, send_partials
from kerneldecl.templates.hopper.split_k_workspace import PartialSums, keep_partials
from kerneldecl.templates.hopper.store import (
    StoreContext,
    TileOperandLoads,
    load_aux,
    load_tile_operand,
    store_chunks,
    store_tile,
    wait_for_stores,
)
from kerneldecl.templates.hopper.stream_k import Workspace, add_partials, store_partials
from kerneldecl.templates.hopper.tile_scheduler import TileScheduler
from kerneldecl.templates.hopper.tma import ENCODE
from kerneldecl.templates.hopper.turns import skip, wait_for_turn


@T.inline
def _init_barriers(kernel, smem):
    """Have one thread initialise the barriers, and the cluster meet, or say that it is there where it meets later."""
    params = T.meta_var(kernel.params)
    smem.full.init(kernel.full_arrivals)
    smem.empty.init(params.consumers_per_tile * 4 * (params.cluster_m + params.cluster_n - 1))
    smem.order.init(4)
    if kernel.streams_tile_operand:
        smem.tile_operand.init(1)
    if kernel.sends_partials:
        smem.received.init(1)
    T.ptx.fence.mbarrier_init.release.cluster()
    meet_at_start(kernel)


@T.inline
def _prefetch(cta, is_its_warp):
    """Have one thread of a warp prefetch the first k-tiles of the CTA's tile."""
    if is_its_warp:
        if T.cuda.elect_sync():
            upcoming = TileScheduler(cta.kernel, cta.first, cta.kernel.clusters)
            prefetch_k_tiles(cta, upcoming)
        T.cuda.warp_sync()


@T.inline
def _wait_for_preceding(cta, is_first_warp):
    """Wait for the preceding kernel where this one may start before it has ended (PDL), and prefetch the first k-tiles meanwhile."""
    kernel = T.meta_var(cta.kernel)
    if kernel.params.pdl == 1 or kernel.params.workspace == 1:
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
    if kernel.prefetched_k_tiles > 0 and kernel.early_k_tiles == 0:
        _prefetch(cta, is_first_warp)
    if kernel.is_pdl_secondary:
        T.ptx.griddepcontrol.wait()


@T.inline
def _store_stream_k(cta, context, workspace, scheduler, at):
    """Store a tile of which other clusters may have parts: hand this one's over, or add theirs before."""
    kernel, consumer = T.meta_var((cta.kernel, cta.consumer))
    if scheduler.is_finished_by_another():
        store_partials(kernel, workspace, context.acc, cta.block, consumer, cta.lanes)
    else:
        for number in T.serial(scheduler.peers()):
            peer = T.meta_var(scheduler.peer(number) * kernel.params.cluster_ctas + cta.ids.rank)
            add_partials(kernel, workspace, context.acc, peer, consumer, cta.lanes)
        store_tile(context, at)


@T.inline
def _expect(cta, is_first_warp):
    """Have one thread say how much the CTA receives from others that share its tile's k."""
    if cta.kernel.sends_partials:
        if is_first_warp:
            if T.cuda.elect_sync():
                expect_partials(cta.kernel, cta.smem.received, cta.rank.split)
            T.cuda.warp_sync()


@T.inline
def _send(cta, context):
    """Have a consumer send its accumulators to the CTAs of its cluster, where these have stages once none of them multiplies any more."""
    meet_before_sending(cta.kernel)
    send_partials(cta.kernel, context.acc, cta.smem, cta.rank.split, cta.consumer_thread(cta.consumer))


@T.inline
def _process_tile(cta, consumer, context, workspace, scheduler):
    """Have a consumer multiply its part of a tile and store the results."""
    kernel = T.meta_var(cta.kernel)
    row, column = meta_vars(cta.tile_origin(scheduler))
    at = T.meta_var((scheduler.batch, row + consumer.first_row, cta.result_column(column), cta.consumer))
    if context.plan.streams:
        load_tile_operand(context, at)
    run_mainloop(consumer, scheduler.k_tile_count(), (row, column, cta.first_k_tile(scheduler)))
    if context.plan.aux_buffers == 2:
        load_aux(context, 0, at)
    if kernel.tail_k_tiles == 0:
        finish_mainloop(consumer)
    if kernel.params.workspace == 1:
        done_with_stages(kernel)
        keep_partials(workspace, context.acc, (cta.first_of_all, cta.rank.split), consumer.index, cta.thread)
    elif kernel.params.split_k > 1:
        _send(cta, context)
    elif kernel.tail_k_tiles > 0:
        chunks = T.meta_var(context.plan.chunks)
        finish_first_mma_tile(consumer)
        store_chunks(context, at, 0, chunks // 2)
        finish_mainloop(consumer)
        store_chunks(context, at, chunks // 2, chunks)
    elif kernel.params.stream_k == 0:
        store_tile(context, at)
    else:
        _store_stream_k(cta, context, workspace, scheduler, at)


@T.inline
def _consume(cta, workspace):
    """Have a consumer warpgroup multiply what stages hold and store results, tile after tile."""
    kernel, smem, plan = T.meta_var((cta.kernel, cta.smem, cta.kernel.epilogue_plan))
    _, registers = meta_vars(kernel.maxnreg)
    if registers > 0:
        T.ptx.setmaxnreg.inc.sync.aligned.u32(registers)
    acc = T.alloc_local((kernel.accum.registers,), kernel.accum.register_dtype)
    packed = T.alloc_local((4,), "uint32")
    aux = T.meta_var(plan.aux_registers())
    a_descriptor = T.uint64(0)
    b_descriptor = T.uint64(0)
    if not kernel.a.in_registers:
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(a_descriptor), smem.a.ptr_to([0, 0]), *kernel.a.descriptor)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(b_descriptor), smem.b.ptr_to([0, 0]), *kernel.b.descriptor)
    state = PipelineState(kernel.params.stages, 0)
    fragments = T.alloc_local((kernel.a_fragments,), "uint32") if kernel.a.in_registers else T.meta_var(None)
    products = T.meta_var(kernel.products)
    partials = T.alloc_local((products.registers,), products.register_dtype) if kernel.k_tile_scales is not None else T.meta_var(None)
    consumer = T.meta_var(
        Consumer(
            kernel=kernel,
            acc=acc,
            descriptors=(a_descriptor, b_descriptor),
            state=state,
            barriers=smem,
            index=cta.consumer,
            lane=cta.lanes[1],
            rank=cta.rank,
            fragments=fragments,
            partials=partials,
            warp=cta.lanes[0],
        )
    )
    loaded = PipelineState(1, 0) if plan.streams else T.meta_var(None)
    elements = T.meta_var(T.decl_buffer((8,), plan.epilogue.dtype, data=packed.data, scope="local") if plan.streams else None)
    tile_operand = T.meta_var(TileOperandLoads(cta.maps[3], smem.tile_operand, loaded, elements) if plan.streams else None)
    context = T.meta_var(
        StoreContext(
            plan=plan, acc=acc, aux=aux, packed=packed, staging=smem.staging, map=cta.maps[2], lanes=cta.lanes, tile_operand=tile_operand
        )
    )
    if kernel.params.is_pingpong:
        skip(kernel, state, cta.consumer * kernel.k_tiles)
        phase = 1 - cta.consumer
        scheduler = TileScheduler(kernel, cta.first + cta.consumer * kernel.clusters, 2 * kernel.clusters)
    else:
        phase = 0
        scheduler = TileScheduler(kernel, cta.first, kernel.clusters)
    while scheduler.valid():
        wait_for_turn(kernel, smem.order, cta.consumer, phase)
        _process_tile(cta, consumer, context, workspace, scheduler)
        if kernel.params.is_pingpong:
            skip(kernel, state, kernel.k_tiles)
        scheduler.advance()
    wait_for_stores(plan, (cta.lanes[0] == 0) & (cta.lanes[1] == 0))


@T.inline
def _reduce_split_k(cta, consumer):
    """Have a consumer add up its share of the accumulators that the CTAs of its cluster sent each other."""
    kernel, params = T.meta_var((cta.kernel, cta.kernel.params))
    last = TileScheduler(kernel, cta.first, kernel.clusters)
    row = T.meta_var(last.row * params.block_m + consumer * (params.mma_tiles * MMA_TILE_ROWS))
    thread = T.meta_var(cta.consumer_thread(consumer))
    cta.smem.received.wait(0, 0)
    at = T.meta_var((last.batch, row, last.column * params.block_n))
    reduce_partials(kernel, cta.smem.partials, cta.rank.split, thread, at, cta.lanes)


def _alloc_stages(pool: Any, stages: int, factor: Operand) -> Any:
    """Allocate stages of scales or zero points in shared memory, each where TMA's boxes may start."""
    return pool.alloc((stages, factor.aligned_bytes // factor.item_bytes), factor.dtype, align=TMA_SMEM_ALIGN_BYTES)


def _alloc_partials(pool: Any, kernel: GemmKernel) -> Any:
    """Allocate the shared memory to which the CTAs of a cluster send accumulators: beside the stages, or in their place."""
    end = pool.offset
    if kernel.reduces_in_stages:
        pool.move_base_to(0)
    partials = pool.alloc(kernel.split_k_shape, kernel.accum.register_dtype, align=128)
    pool.move_base_to(max(end, pool.offset))
    return partials


@T.inline
def _run(kernel, maps, ids, workspace):
    """Have a CTA take its tiles one after the other: the first warpgroup is the producer, the others are consumers."""
    params, plan = T.meta_var((kernel.params, kernel.epilogue_plan))
    pool = T.SMEMPool()
    a_stages = pool.alloc((params.stages, kernel.a.stage_elements), kernel.a.dtype, align=1024)
    b_stages = pool.alloc((params.stages, kernel.b.stage_elements), kernel.b.dtype, align=1024)
    scales = _alloc_stages(pool, params.stages, kernel.scales) if kernel.scales is not None else T.meta_var(None)
    zeros = _alloc_stages(pool, params.stages, kernel.zeros) if kernel.zeros is not None else T.meta_var(None)
    column_scales = _alloc_stages(pool, params.stages, kernel.column_scales) if kernel.column_scales is not None else T.meta_var(None)
    staging_shape = T.meta_var((params.consumers, *plan.staging_shape))
    staging = T.meta_var(pool.alloc(staging_shape, plan.epilogue.dtype, align=1024) if plan.buffers > 0 else None)
    partials = _alloc_partials(pool, kernel) if kernel.sends_partials else T.meta_var(None)
    full = TMABar(pool, params.stages)
    empty = MBarrier(pool, params.stages)
    order = MBarrier(pool, 2)
    received = TMABar(pool, 1) if kernel.sends_partials else T.meta_var(None)
    tile_operand = TMABar(pool, params.consumers) if plan.streams else T.meta_var(None)
    pool.commit()
    smem = T.meta_var(
        Smem(
            a=a_stages,
            b=b_stages,
            scales=scales,
            zeros=zeros,
            column_scales=column_scales,
            staging=staging,
            partials=partials,
            full=full,
            empty=empty,
            order=order,
            received=received,
            tile_operand=tile_operand,
        )
    )
    if kernel.early_k_tiles > 0 and kernel.prefetched_k_tiles > 0:
        # DRAM idles until then, so that the prefetch waits neither for barriers nor for the cluster.
        starting = T.meta_var(Cta(kernel=kernel, maps=maps, smem=smem, ids=ids, consumer=None))
        _prefetch(starting, (ids.warpgroup == 0) & (ids.warp == 0))
    _init_barriers(kernel, smem)
    consumer: T.let = ids.warpgroup - 1
    cta = T.meta_var(Cta(kernel=kernel, maps=maps, smem=smem, ids=ids, consumer=consumer))
    _expect(cta, (ids.warpgroup == 0) & (ids.warp == 0))
    _wait_for_preceding(cta, (ids.warpgroup == 0) & (ids.warp == 0))
    if ids.warpgroup == 0:
        produce(cta)
        meet_as_producer(kernel)
    else:
        _consume(cta, workspace)
    leave(kernel, ids.warpgroup == 0)
    if kernel.sends_partials:
        if ids.warpgroup > 0:
            _reduce_split_k(cta, ids.warpgroup - 1)


def _workspace(kernel: GemmKernel) -> Workspace | PartialSums | None:
    if kernel.params.workspace == 1:
        return PartialSums(kernel)
    return Workspace(kernel) if kernel.params.stream_k > 0 else None


def _host_body(kernel: GemmKernel, workspace: Workspace | PartialSums | None, body: Any) -> Any:
    """Return a kernel's body with those of the kernels around it: clearing flags, copying operands before; adding partial sums behind."""
    body = body if workspace is None else workspace.allocated_for(body)
    return packed(kernel.packings, kernel.sm_count, body) if kernel.packings else body


@T.inline
def _encode(tensor_map, operand):
    """Encode the tensor map of an operand that TMA loads."""
    if not operand.via_registers:
        T.call_packed(ENCODE, tensor_map, operand.dtype, *operand.tma.map.args)


@T.inline
def _encode_tail(tensor_map, operand):
    """Encode the tensor map of an operand's last rows."""
    T.call_packed(ENCODE, tensor_map, operand.dtype, *operand.tma.tail.map.args)


def build(kernel: GemmKernel) -> tvm.IRModule:  # noqa: C901  a branch for each tensor map that not every kernel has
    """Return a module whose `main` is the kernel, on the parameters given."""
    params, epilogue = kernel.params, kernel.epilogue
    workspace = _workspace(kernel)

    # The names of tensor maps are arguments on the host, and so part of the digest under which measurements are kept.
    @T.prim_func(check_well_formed=False)
    def main():
        rows_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        _encode(rows_map, kernel.a)
        columns_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        _encode(columns_map, kernel.b)
        store_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if kernel.epilogue_plan.stores_by_tma:
            T.call_packed(ENCODE, store_map, epilogue.dtype, *epilogue.map.args)

        # Only where it is used, so that the code of other kernels does not change.
        if kernel.streams_tile_operand:
            tile_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            T.call_packed(ENCODE, tile_map, epilogue.dtype, *epilogue.tile_operand.map.args)
        else:
            tile_map = T.meta_var(None)
        if kernel.scales is not None:
            scales_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            _encode(scales_map, kernel.scales)
        else:
            scales_map = T.meta_var(None)
        factor = T.meta_var(kernel.zeros or kernel.column_scales)  # no kernel has both
        if factor is not None:
            zeros_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            _encode(zeros_map, factor)
        else:
            zeros_map = T.meta_var(None)
        if kernel.a.has_tail:
            last_rows_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            _encode_tail(last_rows_map, kernel.a)
        else:
            last_rows_map = T.meta_var(None)
        if kernel.b.has_tail:
            last_columns_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
            _encode_tail(last_columns_map, kernel.b)
        else:
            last_columns_map = T.meta_var(None)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        if kernel.is_pdl_secondary:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([params.cluster_ctas])
        block = T.cta_id([kernel.clusters * params.cluster_ctas])
        group = T.warpgroup_id([params.consumers + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        ids = T.meta_var(Ids(rank=rank, block=block, warpgroup=group, warp=warp, lane=lane))
        maps = T.meta_var((rows_map, columns_map, store_map, tile_map, scales_map, zeros_map, last_rows_map, last_columns_map))
        _run(kernel, maps, ids, workspace)

    body = _host_body(kernel, workspace, main.body)
    func = tirx.PrimFunc(list(kernel.func_params), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
