"""Owns the TIRx kernel of attention on wgmma: its shared memory, its barriers, and who is producer and who consumer.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import MBarrier, TMABar
from tvm.script import tirx as T

from kerneldecl.templates.hopper.attention_config import AttentionKernel
from kerneldecl.templates.hopper.attention_consumer import consume
from kerneldecl.templates.hopper.attention_producer import Smem, prefetch_first, produce
from kerneldecl.templates.hopper.attention_transpose import transposed_of, transposing
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.tma import ENCODE


@T.inline
def _cluster_sync():
    # The producer warp may come here in parts, so the barrier is not the aligned one.
    T.ptx.barrier.cluster.arrive.release()
    T.ptx.barrier.cluster.wait.acquire()


@T.inline
def _init_barriers(params, smem):
    """Have one thread initialise the barriers, and the cluster meet."""
    smem.q_full.init(1)
    smem.q_empty.init(1)
    smem.k_full.init(1)
    smem.k_empty.init(4 * params.consumers * params.cluster)
    smem.v_full.init(1)
    smem.v_empty.init(4 * params.consumers * params.cluster)
    T.ptx.fence.mbarrier_init.release.cluster()
    if params.cluster > 1:
        _cluster_sync()
    else:
        T.cuda.cta_sync()


@T.inline
def _wait_for_preceding(kernel, maps, cta, is_first_warp):
    """Wait until the preceding kernel has ended, and prefetch what is loaded first meanwhile."""
    # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
    T.ptx.griddepcontrol.launch_dependents()
    if is_first_warp:
        if T.cuda.elect_sync():
            prefetch_first(kernel, maps, cta)
        T.cuda.warp_sync()
    T.ptx.griddepcontrol.wait()


@T.inline
def _run(kernel, maps, ids):
    """Have a CTA's first warpgroup be the producer, and the others consumers."""
    params = T.meta_var(kernel.params)
    cta, (group, warp, lane) = T.meta_var(ids)
    dtype = T.meta_var(kernel.spec.result_dtype)  # of 16 bits, in which places are counted
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
    _init_barriers(params, smem)
    if params.pdl == 1:
        _wait_for_preceding(kernel, maps, cta, (group == 0) & (warp == 0))
    producer_registers, consumer_registers = meta_vars(params.maxnreg)
    if group == 0:
        if producer_registers > 0:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(producer_registers)
        if warp == 0:
            if T.cuda.elect_sync():
                produce(kernel, smem, maps, cta)
            T.cuda.warp_sync()
    else:
        if consumer_registers > 0:
            T.ptx.setmaxnreg.inc.sync.aligned.u32(consumer_registers)
        index: T.let = group - 1
        consume(kernel, smem, maps[3], cta, (index, warp, lane))
    if params.cluster > 1:
        # No CTA leaves while others still write to its stages or arrive at its barriers.
        _cluster_sync()


def build(kernel: AttentionKernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the attention's parameters."""
    params = kernel.params
    transposed = transposed_of(kernel) if kernel.is_float8 else None
    maps = kernel.maps(transposed)
    q_args, k_args, v_args, o_args = (tensor_map.args for tensor_map in maps)
    dtype, o_dtype = maps[0].dtype, maps[3].dtype

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
        T.call_packed(ENCODE, results_map, o_dtype, *o_args)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": params.ctas_per_sm})
        if params.pdl == 1:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([params.cluster])
        block = T.cta_id([kernel.clusters * params.cluster])
        group = T.warpgroup_id([params.consumers + 1])
        warp = T.warp_id_in_wg([4])
        lane = T.lane_id([32])
        _run(kernel, (queries_map, keys_map, values_map, results_map), ((block // params.cluster, rank), (group, warp, lane)))

    body = main.body
    if transposed is not None:
        body = tirx.SeqStmt([tirx.AllocBuffer(transposed), transposing(kernel, transposed), body])
    func = tirx.PrimFunc(list(kernel.arguments.values()), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
