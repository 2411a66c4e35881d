"""Owns the kernels of attention against a KV cache: their shared memory, the loop over blocks of keys, and the function around them.

Knows nothing of how parameters are chosen.
"""

from __future__ import annotations

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.templates.gpu.attention_decode_combine import Workspace, combining, flat_arguments
from kerneldecl.templates.gpu.attention_decode_config import DecodeKernel
from kerneldecl.templates.gpu.attention_decode_copy import fetch, find_pages, guess_pages, prefetch_first
from kerneldecl.templates.gpu.attention_decode_products import load_queries, multiply, prepare
from kerneldecl.templates.gpu.attention_decode_results import add_groups, leave, store
from kerneldecl.templates.gpu.attention_decode_warp import Registers, Smem, Warp
from kerneldecl.templates.hopper.epilogue import meta_vars


@T.inline
def _meet_group(warp):
    """Have the warps that share blocks of keys wait for each other, and see what the others have copied."""
    warps_m = T.meta_var(warp.kernel.params.warps_m)
    if warps_m == 1:
        T.cuda.warp_sync()
    else:
        T.ptx.bar.sync(T.cast(1 + warp.group, "uint32"), T.uint32(warps_m * WARP_LANES))


@T.inline
def stream(warp, begin, end, guessed, pages):
    """Go through a group's blocks of keys: wait for one, fetch the one `stages - 1` further into the freed stage, multiply."""
    params = T.meta_var(warp.kernel.params)
    fetched: T.int32 = begin + warp.group
    turn: T.int32 = 0
    find_pages(warp, fetched, guessed, pages)
    for s in T.unroll(params.stages - 1):
        fetch(warp, fetched, end, turn, pages, warp.first_stage + s)
    load_queries(warp)
    prepare(warp)
    block: T.int32 = begin + warp.group
    slot: T.int32 = 0
    while block < end:
        T.ptx.cp.async_.wait_group(params.stages - 2)
        _meet_group(warp)
        # Into the stage that all have finished reading.
        freed = T.meta_var(T.Select(slot == 0, params.stages - 1, slot - 1))
        fetch(warp, fetched, end, turn, pages, warp.first_stage + freed)
        multiply(warp, block, warp.first_stage + slot)
        slot = T.Select(slot == params.stages - 1, 0, slot + 1)
        block = block + params.groups
    T.ptx.cp.async_.wait_group(0)


def _registers(kernel: DecodeKernel) -> Registers:
    """Return a lane's registers, allocated."""
    count = kernel.params.row_tiles
    return Registers(
        q=T.alloc_local((count * kernel.score_steps * 2,), "uint32"),
        acc=T.alloc_local((count * kernel.value_steps * 4,), "float32"),
        scores=T.alloc_local((count * kernel.sub_blocks * 4,), "float32"),
        powers=T.alloc_local((count * kernel.sub_blocks * 2,), "uint32"),
        reference=T.alloc_local((count * 2,), "float32"),
        total=T.alloc_local((count * 2,), "float32"),
        partial=T.alloc_local((count * 2,), "float32"),
        limit=T.alloc_local((count * 2,), "int32"),
    )


@T.inline
def _run(kernel, args, workspace, ids):
    """Compute a thread block's part: its rows of queries, and its share of the blocks of keys."""
    params, spec = T.meta_var((kernel.params, kernel.spec))
    block, rank, number, lane = meta_vars(ids)
    pool = T.SMEMPool()  # names of its buffers stand in the generated code
    keys = pool.alloc((kernel.ring, params.block_n, kernel.key_width), spec.dtype, align=16)
    values = pool.alloc((kernel.ring, params.block_n, kernel.value_width), spec.dtype, align=16) if not spec.is_latent else keys
    end_of_ring = T.meta_var(pool.offset)
    pool.move_base_to(0)
    results = pool.alloc((params.groups, params.block_rows, kernel.result_width), "float32", align=16)
    pool.move_base_to(max(end_of_ring, pool.offset))
    references = pool.alloc((params.groups, params.block_rows), "float32", align=16)
    totals = pool.alloc((params.groups, params.block_rows), "float32", align=16)
    pool.commit()
    smem = T.meta_var(Smem(k=keys, v=values, results=results, references=references, totals=totals))
    registers = T.meta_var(_registers(kernel))
    unit, part, place = meta_vars(kernel.place(block // params.cluster))
    length: T.int32 = spec.keys
    split = T.meta_var(part * params.cluster + rank)
    warp = T.meta_var(Warp(kernel=kernel, args=args, smem=smem, registers=registers, place=place, length=length, ids=(number, lane)))
    # Where a group begins if the sequence has all keys that it may have, or the only part.
    guessed = T.meta_var(-(-spec.keys // params.block_n) * split // params.split_k + warp.group)
    if kernel.pdl:
        # The next kernel may start as soon as SMs have room: it waits, as this one does, until its preceding kernel has ended.
        T.ptx.griddepcontrol.launch_dependents()
        prefetch_first(warp, guessed)
        T.ptx.griddepcontrol.wait()
    pages = T.alloc_local((1,), "int32")
    guess_pages(warp, guessed, pages)
    if kernel.has_lengths:
        length = T.max(T.min(args.lengths[place[0]], spec.keys), 0)
    blocks = T.meta_var((length + (params.block_n - 1)) // params.block_n)
    begin: T.int32 = blocks * split // params.split_k
    end: T.int32 = blocks * (split + 1) // params.split_k
    stream(warp, begin, end, guessed, pages)
    leave(warp)
    add_groups(warp)
    store(warp, workspace, unit, part, rank)


def build(kernel: DecodeKernel) -> tvm.IRModule:
    """Return a module whose `main` is the attention."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in kernel.computation.arguments}
    workspace, params = Workspace.of(kernel), kernel.params

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": params.blocks})
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([params.cluster]) if params.cluster > 1 else T.meta_var(0)
        block = T.cta_id([kernel.grid])
        warp = T.warp_id([params.warps])
        lane = T.lane_id([WARP_LANES])
        args = T.meta_var(flat_arguments(buffers))
        _run(kernel, args, workspace, (block, rank, warp, lane))

    body = main.body
    if kernel.parts > 1:
        body = tirx.SeqStmt(
            [tirx.AllocBuffer(workspace.results), tirx.AllocBuffer(workspace.stats), body, combining(kernel, buffers, workspace)]
        )
    func = tirx.PrimFunc(list(buffers.values()), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
