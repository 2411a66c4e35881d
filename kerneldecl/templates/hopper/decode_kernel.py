"""Owns the TIRx kernel of attention against a KV cache on wgmma: shared memory, barriers, who is producer and who consumer.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.analysis.wgmma_decode import BLOCK_KEYS, CONSUMERS, MAXNREG
from kerneldecl.templates.gpu.attention_decode_combine import Workspace, combining, flat_arguments, meet
from kerneldecl.templates.hopper.decode_config import WgmmaDecodeKernel
from kerneldecl.templates.hopper.decode_consumer import consumer_of, go_through_pairs, prepare
from kerneldecl.templates.hopper.decode_producer import Smem, Span, produce
from kerneldecl.templates.hopper.decode_results import add_consumers, load_queries, store_parts, store_results
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.tma import ENCODE


@T.inline
def _consume(kernel, smem, span, args, at):
    """Have a consumer compute its columns of the CTA's rows, and store them."""
    parity, ids, (workspace, unit, part) = T.meta_var(at)
    consumer = T.meta_var(consumer_of(kernel, smem, span, parity, ids))
    load_queries(consumer, args.q)
    prepare(consumer)
    go_through_pairs(consumer)
    add_consumers(consumer)
    if kernel.parts == 1:
        store_results(consumer, args.o)
    else:
        store_parts(consumer, workspace, unit, part)


@T.inline
def _run(kernel, maps, args, workspace, ids):
    """Have a CTA's first warpgroup be the producer, and the others consumers."""
    spec, params = meta_vars((kernel.spec, kernel.params))
    block, rank, group, warp, lane = meta_vars(ids)
    pool = T.SMEMPool()
    q = pool.alloc((kernel.q_elements,), spec.dtype, align=1024)
    kv = pool.alloc((params.stages, kernel.stage_chunks * BLOCK_KEYS * BLOCK_KEYS), spec.dtype, align=1024)
    references = pool.alloc((CONSUMERS, MMA_TILE_ROWS), "float32", align=16)
    totals = pool.alloc((CONSUMERS, MMA_TILE_ROWS), "float32", align=16)
    full = TMABar(pool, params.stages * kernel.stage_chunks)
    empty = MBarrier(pool, params.stages * CONSUMERS)
    pool.commit()
    smem = T.meta_var(Smem(q, kv, references, totals, full, empty))
    full.init(1)
    empty.init(4 * params.cluster)
    T.ptx.fence.mbarrier_init.release.cluster()
    meet(params.cluster)
    if kernel.pdl:
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
    unit, part, place = meta_vars(kernel.place(block))
    length: T.int32 = spec.keys
    if kernel.has_lengths:
        length = T.max(T.min(args.lengths[place[0]], spec.keys), 0)
    pairs = T.meta_var((length + (CONSUMERS * BLOCK_KEYS - 1)) // (CONSUMERS * BLOCK_KEYS))
    begin: T.int32 = pairs * part // params.split_k
    end: T.int32 = pairs * (part + 1) // params.split_k
    span = T.meta_var(Span(place, rank, length, begin, end))
    producer_registers, consumer_registers = meta_vars(MAXNREG)
    if group == 0:
        T.ptx.setmaxnreg.dec.sync.aligned.u32(producer_registers)
        if warp == 0:
            if T.cuda.elect_sync():
                produce(kernel, smem, maps, args.table, span)
            T.cuda.warp_sync()
    elif group == 1:
        T.ptx.setmaxnreg.inc.sync.aligned.u32(consumer_registers)
        _consume(kernel, smem, span, args, (0, (warp, lane), (workspace, unit, part)))
    else:
        T.ptx.setmaxnreg.inc.sync.aligned.u32(consumer_registers)
        _consume(kernel, smem, span, args, (1, (warp, lane), (workspace, unit, part)))
    if params.cluster > 1:
        # No CTA leaves while others still write to its stages or arrive at its barriers.
        meet(params.cluster)


def build(kernel: WgmmaDecodeKernel) -> tvm.IRModule:
    """Return a module whose `main` is the attention."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in kernel.computation.arguments}
    spec, params, workspace = kernel.spec, kernel.params, Workspace.of(kernel)
    k_args = kernel.cache_map(buffers["K"], spec.head_dim).args
    v_args = k_args if spec.is_latent else kernel.cache_map(buffers["V"], spec.value_dim).args

    @T.prim_func(check_well_formed=False)
    def main():
        keys_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, keys_map, spec.dtype, *k_args)
        values_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if not spec.is_latent:
            T.call_packed(ENCODE, values_map, spec.dtype, *v_args)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([params.cluster])
        block = T.cta_id([kernel.grid])
        group = T.warpgroup_id([CONSUMERS + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        args = T.meta_var(flat_arguments(buffers))
        _run(kernel, (keys_map, values_map), args, workspace, (block, rank, group, warp, lane))

    body = main.body
    if kernel.parts > 1:
        body = tirx.SeqStmt(
            [tirx.AllocBuffer(workspace.results), tirx.AllocBuffer(workspace.stats), body, combining(kernel, buffers, workspace)]
        )
    func = tirx.PrimFunc(list(buffers.values()), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
