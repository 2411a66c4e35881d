"""Owns the TIRx kernel on wgmma: warpgroups that load and that multiply, and the ring of stages between them.

Knows nothing of where operands and results lie in memory, which `Operand` and `Results` tell, nor how parameters are chosen.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import STORE, copy_out, each, fetch, fill, store_sums
from kerneldecl.templates.hopper.gather import gather
from kerneldecl.templates.hopper.kernel_config import Kernel
from kerneldecl.templates.hopper.mainloop import end_first_slab, end_sums, start_sums
from kerneldecl.templates.hopper.pack import packed
from kerneldecl.templates.hopper.params import GATHERING_REGISTERS, REGISTERS, SLAB, WARPGROUP
from kerneldecl.templates.hopper.split_k import finish_sums, send_sums
from kerneldecl.templates.hopper.stream_k import Workspace, add_sums, leave_sums
from kerneldecl.templates.hopper.tile_scheduler import At, Sums, Walk
from kerneldecl.templates.hopper.tma import ENCODE, copy, prefetch


def _tile(kernel, walk, place):
    """Return the first row and column of a block's tile."""
    rank_m, rank_n, _ = place
    tiles = kernel.tiles
    return (walk.row * tiles.cluster_m + rank_m) * tiles.block_m, (walk.column * tiles.cluster_n + rank_n) * tiles.block_n


@T.inline
def _ask_ahead(kernel, walk, maps, place):
    """Have one thread ask for the first steps of a block's tile while the kernel in front ends.

    A prefetch is no access: it changes nothing, and what that kernel still writes goes through the same cache.
    """
    rows_map, columns_map = each(maps)
    rank_m, rank_n, part = each(place)
    row, column = each(_tile(kernel, walk, place))
    for i in T.serial(kernel.ahead_steps):
        at = T.meta_var((walk.batch, part * kernel.part_steps + i))
        prefetch(kernel.rows.copies[0], rows_map, row, rank_n, at)
        prefetch(kernel.columns.copies[0], columns_map, column, rank_m, at)


@T.inline
def _load(kernel, walk, maps, stages, barriers, place):
    """Have one thread fill stages with tiles of both operands, each block its share of what blocks of its cluster have in common."""
    rows_map, columns_map = each(maps)
    rows_stages, columns_stages = each(stages)
    full, empty = each(barriers)
    rank_m, rank_n, part = each(place)
    tiles = T.meta_var(kernel.tiles)
    state = PipelineState(tiles.stages, 1)
    rows_mask = T.meta_var(T.cast(T.shift_left(tiles.row_peers, rank_m), "uint16") if tiles.cluster_n > 1 else None)
    columns_mask = T.meta_var(T.cast(T.shift_left(tiles.column_peers, rank_n * tiles.cluster_m), "uint16") if tiles.cluster_m > 1 else None)
    while walk.valid():
        row, column = each(_tile(kernel, walk, place))
        begin = T.meta_var(part * kernel.part_steps if kernel.tiles.split_k > 1 else walk.begin())
        for i in T.serial(walk.count()):
            empty.wait(state.stage, state.phase)
            full.arrive(state.stage, kernel.stage_bytes)
            at = T.meta_var((walk.batch, begin + i))
            counted = T.meta_var(full.ptr_to([state.stage]))
            copy(kernel.rows, kernel.rows.copies[0], rows_map, (rows_stages, state), row, rank_n, at, counted, rows_mask)
            copy(kernel.columns, kernel.columns.copies[0], columns_map, (columns_stages, state), column, rank_m, at, counted, columns_mask)
            state.advance()
        walk.advance()


@T.inline
def _skip(kernel, state, steps):
    """Pass over stages that another consumer takes."""
    state.stage = state.stage + steps
    state.phase = T.bitwise_xor(state.phase, state.stage // kernel.tiles.stages % 2)
    state.stage = state.stage % kernel.tiles.stages


@T.inline
def _load_gathered(kernel, walk, maps, stages, barriers, sources, part, thread):
    """Have a warpgroup fill stages where operands are gathered: all threads load them, the first one starts the copies of the other."""
    rows_stages, columns_stages = each(stages)
    full, empty = each(barriers)
    tiles = T.meta_var(kernel.tiles)
    state = PipelineState(tiles.stages, 1)
    copied = T.meta_var(kernel.copied_bytes)
    block_k = T.meta_var(kernel.rows.row_elements)
    while walk.valid():
        row = T.meta_var(walk.row * tiles.block_m)
        column = T.meta_var(walk.column * tiles.block_n)
        begin = T.meta_var(part * kernel.part_steps if kernel.tiles.split_k > 1 else walk.begin())
        for i in T.serial(walk.count()):
            empty.wait(state.stage, state.phase)
            at = T.meta_var((walk.batch, begin + i))
            if copied > 0:
                if thread == 0:
                    full.arrive(state.stage, copied)
                    counted = T.meta_var(full.ptr_to([state.stage]))
                    if kernel.rows.gather is None:
                        copy(kernel.rows, kernel.rows.copies[0], maps[0], (rows_stages, state), row, 0, at, counted, None)
                    if kernel.columns.gather is None:
                        copy(kernel.columns, kernel.columns.copies[0], maps[1], (columns_stages, state), column, 0, at, counted, None)
            if kernel.rows.gather is not None:
                gather(kernel.rows, sources[0], rows_stages, state.stage, (walk.batch, row, (begin + i) * block_k), thread)
            if kernel.columns.gather is not None:
                gather(kernel.columns, sources[1], columns_stages, state.stage, (walk.batch, column, (begin + i) * block_k), thread)
            T.ptx.fence.proxy.async_.shared__cta()
            full.arrive(state.stage)
            state.advance()
        walk.advance()


def _corner(kernel, chunk, row, column):
    """Return where a chunk of a consumer's sums begins: in its first slab, from its first columns on."""
    per_slab = kernel.tiles.block_n // 2 // kernel.chunk_sums
    return row + chunk // per_slab * SLAB, column + chunk % per_slab * (kernel.chunk_sums * 2)


@T.inline
def _fetch(kernel, addends, chunk, at, lanes):
    """Have a warpgroup load what the epilogue adds to a chunk of its sums."""
    batch, row, column, _ = each(at)
    x, y = each(_corner(kernel, chunk, row, column))
    fetch(kernel.results, addends, chunk % kernel.addend_sets * kernel.chunk_sums, (batch, x, y), lanes)


@T.inline
def _store_staged(kernel, acc, addends, packed, staging, store_map, at, lanes, begin, end):
    """Have a warpgroup store some chunks of its sums through shared memory, turn by turn in its buffers. It has the first one's addends."""
    results = T.meta_var(kernel.results)
    batch, row, column, worker = each(at)
    warp, lane = each(lanes)
    buffers = T.meta_var(kernel.buffers)
    chunks = T.meta_var(results.chunks(kernel.tiles.sums))
    sums = T.meta_var(Sums(kernel, acc, 0))
    for number in T.unroll(end - begin):
        chunk = T.meta_var(begin + number)
        turn = T.meta_var(chunk % buffers)
        x, y = each(_corner(kernel, chunk, row, column))
        if kernel.addend_sets == 2:
            if chunk + 1 < chunks:
                _fetch(kernel, addends, chunk + 1, at, lanes)
        else:
            _fetch(kernel, addends, chunk, at, lanes)
        if results.map is not None:
            if (warp == 0) & (lane == 0):
                T.ptx.cp.async_.bulk.wait_group.read(buffers - 1)
        T.cuda.warpgroup_sync(1 + worker)
        places = T.meta_var((chunk * kernel.chunk_sums, chunk % kernel.addend_sets * kernel.chunk_sums))
        fill(results, sums, addends, packed, At(staging, worker, turn), places, (batch, x, y), lanes)
        if results.map is not None:
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.warpgroup_sync(1 + worker)
            if (warp == 0) & (lane == 0):
                T.ptx[STORE.format(results.map.rank)](
                    T.address_of(store_map), *results.coords(batch, x, y), staging.ptr_to([worker, turn, 0])
                )
                T.ptx.cp.async_.bulk.commit_group()
        else:
            T.cuda.warpgroup_sync(1 + worker)
            copy_out(results, At(staging, worker, turn), (batch, x, y), lanes)


@T.inline
def store(kernel, acc, addends, packed, staging, store_map, at, lanes):
    """Have a warpgroup store its sums as results."""
    if kernel.buffers > 0:
        chunks = T.meta_var(kernel.results.chunks(kernel.tiles.sums))
        _store_staged(kernel, acc, addends, packed, staging, store_map, at, lanes, 0, chunks)
    else:
        batch, row, column, _ = each(at)
        for s in T.unroll(kernel.tiles.mma_tiles):
            store_sums(kernel.results, Sums(kernel, acc, s), kernel.tiles.block_n // 2, (batch, row + s * SLAB, column), lanes)


def build(kernel: Kernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the parameters given."""
    tiles, results = kernel.tiles, kernel.results
    maps_store = results.map is not None and kernel.buffers > 0
    workspace = Workspace(kernel) if tiles.stream_k > 0 else None
    loading, multiplying = (GATHERING_REGISTERS if kernel.is_gathered else REGISTERS)[tiles.consumers]

    @T.prim_func(check_well_formed=False)
    def main():
        rows_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if kernel.rows.gather is None:
            T.call_packed(ENCODE, rows_map, kernel.rows.dtype, *kernel.rows.copies[0].map.args)
        columns_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if kernel.columns.gather is None:
            T.call_packed(ENCODE, columns_map, kernel.columns.dtype, *kernel.columns.copies[0].map.args)
        store_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if maps_store:
            T.call_packed(ENCODE, store_map, results.dtype, *results.map.args)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        if kernel.is_early:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([tiles.cluster])
        block = T.cta_id([kernel.clusters * tiles.cluster])
        group = T.warpgroup_id([tiles.consumers + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])

        pool = T.SMEMPool()
        rows_stages = pool.alloc((tiles.stages, kernel.rows.stage_elements), kernel.rows.dtype, align=1024)
        columns_stages = pool.alloc((tiles.stages, kernel.columns.stage_elements), kernel.columns.dtype, align=1024)
        staging_shape = T.meta_var((tiles.consumers, kernel.buffers, results.chunk_elements))
        staging = T.meta_var(pool.alloc(staging_shape, results.dtype, align=1024) if kernel.buffers > 0 else None)
        if tiles.split_k > 1:
            parts = pool.alloc(
                (tiles.split_k, kernel.registers // tiles.split_k // kernel.sent_at_once, tiles.sharers * WARPGROUP, kernel.sent_at_once),
                kernel.registers_dtype,
                align=128,
            )
        full = TMABar(pool, tiles.stages)
        empty = MBarrier(pool, tiles.stages)
        order = MBarrier(pool, 2)
        pool.commit()
        full.init(kernel.fillers)
        empty.init(tiles.sharers * 4 * (tiles.cluster_m + tiles.cluster_n - 1))
        order.init(4)
        T.ptx.fence.mbarrier_init.release.cluster()
        if tiles.cluster > 1:
            T.ptx.barrier.cluster.arrive.release()
            T.ptx.barrier.cluster.wait.acquire()
        else:
            T.cuda.cta_sync()
        rank_m = T.meta_var(0 if tiles.split_k > 1 or tiles.cluster_m == 1 else rank % tiles.cluster_m)
        rank_n = T.meta_var(0 if tiles.split_k > 1 or tiles.cluster_n == 1 else rank // tiles.cluster_m)
        part = T.meta_var(rank if tiles.split_k > 1 else 0)
        place = T.meta_var((rank_m, rank_n, part))
        worker: T.let = group - 1
        first = T.meta_var(block // tiles.cluster)
        if tiles.pdl == 1:
            # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
            T.ptx.griddepcontrol.launch_dependents()
        if kernel.ahead_steps > 0:
            if (group == 0) & (warp == 0):
                if T.cuda.elect_sync():
                    asking = Walk(kernel, first, kernel.clusters)
                    _ask_ahead(kernel, asking, (rows_map, columns_map), place)
                T.cuda.warp_sync()
        if kernel.is_early:
            T.ptx.griddepcontrol.wait()
        if group == 0:
            if loading > 0:
                T.ptx.setmaxnreg.dec.sync.aligned.u32(loading)
            if kernel.is_gathered:
                gathering = Walk(kernel, first, kernel.clusters)
                sources = T.meta_var(kernel.sources)
                _load_gathered(
                    kernel,
                    gathering,
                    (rows_map, columns_map),
                    (rows_stages, columns_stages),
                    (full, empty),
                    sources,
                    part,
                    warp * 32 + lane,
                )
            elif warp == 0:
                if T.cuda.elect_sync():
                    walk = Walk(kernel, first, kernel.clusters)
                    _load(kernel, walk, (rows_map, columns_map), (rows_stages, columns_stages), (full, empty), place)
                T.cuda.warp_sync()
        else:
            if multiplying > 0:
                T.ptx.setmaxnreg.inc.sync.aligned.u32(multiplying)
            acc = T.alloc_local((kernel.registers,), kernel.registers_dtype)
            packed = T.alloc_local((4,), "uint32")
            held = T.meta_var(kernel.addend_sets * kernel.chunk_sums)
            addends = T.meta_var([T.alloc_local((held,), dtype) for dtype in results.addend_dtypes] if kernel.buffers > 0 else [])
            rows_descriptor = T.uint64(0)
            columns_descriptor = T.uint64(0)
            T.cuda.wgmma.encode_matrix_descriptor(T.address_of(rows_descriptor), rows_stages.ptr_to([0, 0]), *kernel.rows.descriptor)
            T.cuda.wgmma.encode_matrix_descriptor(
                T.address_of(columns_descriptor), columns_stages.ptr_to([0, 0]), *kernel.columns.descriptor
            )
            state = PipelineState(tiles.stages, 0)
            if tiles.is_pingpong:
                _skip(kernel, state, worker * kernel.steps)
                turn = 1 - worker
                walk = Walk(kernel, first + worker * kernel.clusters, 2 * kernel.clusters)
            else:
                turn = 0
                walk = Walk(kernel, first, kernel.clusters)
            while walk.valid():
                if tiles.is_pingpong:
                    order.wait(worker, turn)
                    turn = 1 - turn
                elif tiles.is_staggered:
                    if worker == 1:
                        order.wait(1, turn)
                        turn = 1 - turn
                row = T.meta_var(
                    (walk.row * tiles.cluster_m + rank_m) * tiles.block_m + (0 if tiles.is_pingpong else worker * (tiles.mma_tiles * SLAB))
                )
                column = T.meta_var((walk.column * tiles.cluster_n + rank_n) * tiles.block_n)
                at = T.meta_var((walk.batch, row, column, worker))
                descriptors = T.meta_var((rows_descriptor, columns_descriptor))
                start_sums(kernel, acc, descriptors, state, (full, empty, order), worker, lane, place, walk.count())
                if kernel.addend_sets == 2:
                    _fetch(kernel, addends, 0, at, (warp, lane))
                if kernel.late_steps == 0:
                    end_sums(kernel, acc, state, empty, lane, place)
                if tiles.split_k > 1:
                    send_sums(kernel, acc, parts, part, worker * WARPGROUP + warp * 32 + lane)
                elif kernel.late_steps > 0:
                    chunks = T.meta_var(results.chunks(tiles.sums))
                    end_first_slab(kernel, acc)
                    _store_staged(kernel, acc, addends, packed, staging, store_map, at, (warp, lane), 0, chunks // 2)
                    end_sums(kernel, acc, state, empty, lane, place)
                    _store_staged(kernel, acc, addends, packed, staging, store_map, at, (warp, lane), chunks // 2, chunks)
                elif tiles.stream_k == 0:
                    store(kernel, acc, addends, packed, staging, store_map, at, (warp, lane))
                elif walk.is_begun_by_another():
                    leave_sums(kernel, workspace, acc, block, worker, (warp, lane))
                else:
                    for number in T.serial(walk.sharers()):
                        add_sums(kernel, workspace, acc, walk.sharer(number) * tiles.cluster + rank, worker, (warp, lane))
                    store(kernel, acc, addends, packed, staging, store_map, at, (warp, lane))
                if tiles.is_pingpong:
                    _skip(kernel, state, kernel.steps)
                walk.advance()
            if maps_store:
                if (warp == 0) & (lane == 0):
                    T.ptx.cp.async_.bulk.wait_group(0)
        if tiles.cluster > 1:
            # The loading warp may come here in parts, so the barrier is not the aligned one.
            T.ptx.barrier.cluster.arrive.release()
            T.ptx.barrier.cluster.wait.acquire()
        if tiles.split_k > 1:
            if group > 0:
                last = Walk(kernel, first, kernel.clusters)
                row_last = T.meta_var(last.row * tiles.block_m + (group - 1) * (tiles.mma_tiles * SLAB))
                thread = T.meta_var((group - 1) * WARPGROUP + warp * 32 + lane)
                finish_sums(kernel, parts, part, thread, (last.batch, row_last, last.column * tiles.block_n), (warp, lane))

    body = main.body if workspace is None else workspace.allocated_for(main.body)
    body = packed(kernel.packings, kernel.sms, body) if kernel.packings else body
    func = tirx.PrimFunc(list(kernel.params), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
