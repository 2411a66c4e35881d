"""Owns the function of attention against a KV cache: its kernel, and the one that combines the parts of sequences' keys.

Knows nothing of products and softmax, or of how parameters are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.templates.gpu.attention_decode_config import DecodeKernel
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.gpu.attention_decode_kernel import Args, Registers, Smem, Warp, gather, prefetch_first, store, stream

COMBINE_VECTOR = 4
"""Elements of a row of results that a thread combines: 16 bytes."""
AT_ONCE = 8
"""Parts whose results a thread loads before it uses the first."""


class Workspace(NamedTuple):
    """What thread blocks that share keys leave for the kernel that combines it, by unit, part of the keys, and row."""

    results: Any
    stats: Any
    """The maximum that results are distances to, and the sum of powers."""

    @classmethod
    def of(cls, kernel: DecodeKernel) -> Workspace:
        shape = (kernel.units, kernel.params.split_k, kernel.params.rows)
        return cls(
            tirx.decl_buffer((*shape, kernel.spec.value_dim), "float32", "parts"), tirx.decl_buffer((*shape, 2), "float32", "part_sums")
        )


@T.inline
def _run(kernel, args, workspace, ids):
    """Compute a thread block's part: its rows of queries, and its share of the blocks of keys."""
    params, spec = T.meta_var((kernel.params, kernel.spec))
    block, number, lane = meta_vars(ids)
    pool = T.SMEMPool()  # names of its buffers stand in the generated code
    keys = pool.alloc((kernel.ring, params.block_n, kernel.key_width), spec.dtype, align=16)
    values = pool.alloc((kernel.ring, params.block_n, kernel.value_width), spec.dtype, align=16) if not spec.is_latent else keys
    end_of_ring = T.meta_var(pool.offset)
    pool.move_base_to(0)
    results = pool.alloc((params.warps, params.rows, kernel.result_width), "float32", align=16)
    pool.move_base_to(max(end_of_ring, pool.offset))
    references = pool.alloc((params.warps, params.rows), "float32", align=16)
    totals = pool.alloc((params.warps, params.rows), "float32", align=16)
    pool.commit()
    smem = T.meta_var(Smem(k=keys, v=values, results=results, references=references, totals=totals))
    count = T.meta_var(params.row_tiles)
    registers = T.meta_var(
        Registers(
            q=T.alloc_local((count * kernel.score_steps * 2,), "uint32"),
            acc=T.alloc_local((count * kernel.value_steps * 4,), "float32"),
            scores=T.alloc_local((count * kernel.sub_blocks * 4,), "float32"),
            powers=T.alloc_local((count * kernel.sub_blocks * 2,), "uint32"),
            reference=T.alloc_local((count * 2,), "float32"),
            total=T.alloc_local((count * 2,), "float32"),
            partial=T.alloc_local((count * 2,), "float32"),
            limit=T.alloc_local((count * 2,), "int32"),
        )
    )
    rows, shared = meta_vars((block % kernel.row_blocks, block // kernel.row_blocks))
    split, unit = meta_vars((shared % params.split_k, shared // params.split_k))
    place = T.meta_var((unit // spec.kv_heads, unit % spec.kv_heads, rows * params.rows))
    length: T.int32 = spec.keys
    warp = T.meta_var(Warp(kernel=kernel, args=args, smem=smem, registers=registers, place=place, length=length, ids=(number, lane)))
    if kernel.pdl:
        # The next kernel may start as soon as SMs have room: it waits, as this one does, until its preceding kernel has ended.
        T.ptx.griddepcontrol.launch_dependents()
        prefetch_first(warp, -(-spec.keys // params.block_n) * split // params.split_k + number)
        T.ptx.griddepcontrol.wait()
    if kernel.has_lengths:
        length = T.max(T.min(args.lengths[place[0]], spec.keys), 0)
    blocks = T.meta_var((length + (params.block_n - 1)) // params.block_n)
    begin: T.int32 = blocks * split // params.split_k
    end: T.int32 = blocks * (split + 1) // params.split_k
    stream(warp, begin, end)
    gather(warp)
    store(warp, workspace, unit * kernel.row_blocks + rows, split)


@T.inline
def _combine(kernel, args, workspace, ids):
    """Have each thread combine the parts of some elements of a row of results, always in the same order."""
    spec, parts = T.meta_var((kernel.spec, kernel.params.split_k))
    block, column = meta_vars(ids)
    row_in_group, head = meta_vars((block % kernel.group_rows, block // kernel.group_rows))
    unit = T.meta_var(head * kernel.row_blocks + row_in_group // kernel.params.rows)
    row = T.meta_var(row_in_group % kernel.params.rows)
    highest: T.float32 = workspace.stats[unit, 0, row, 0]
    for part in T.unroll(parts - 1):
        highest = T.max(highest, workspace.stats[unit, part + 1, row, 0])
    highest = T.Select(highest == tirx.const(float("-inf"), "float32"), T.float32(0), highest)
    total: T.float32 = 0.0
    sums = T.alloc_local((COMBINE_VECTOR,), "float32")
    theirs = T.alloc_local((AT_ONCE * COMBINE_VECTOR,), "float32")
    for x in T.unroll(COMBINE_VECTOR):
        sums[x] = T.float32(0)
    for group in T.serial(-(-parts // AT_ONCE)):
        for part in T.unroll(AT_ONCE):
            other = T.meta_var(T.min(group * AT_ONCE + part, parts - 1))
            for x in T.vectorized(COMBINE_VECTOR):
                theirs[part * COMBINE_VECTOR + x] = workspace.results[unit, other, row, column + x]
        for part in T.unroll(AT_ONCE):
            if group * AT_ONCE + part < parts:
                other = T.meta_var(T.min(group * AT_ONCE + part, parts - 1))
                factor: T.float32 = T.exp2((workspace.stats[unit, other, row, 0] - highest) * T.float32(kernel.scale_log2))
                total = total + workspace.stats[unit, other, row, 1] * factor
                for x in T.unroll(COMBINE_VECTOR):
                    sums[x] = sums[x] + theirs[part * COMBINE_VECTOR + x] * factor
    inverse: T.float32 = T.Select(total == T.float32(0), T.float32(0), T.float32(1) / total)
    at = T.meta_var(kernel.query_offset(head // spec.kv_heads, head % spec.kv_heads, row_in_group, spec.value_dim) + column)
    for x in T.vectorized(COMBINE_VECTOR):
        args.o[at + x] = T.cast(sums[x] * inverse, spec.dtype)


def _combining(kernel: DecodeKernel, buffers: dict[str, Any], workspace: Workspace) -> Any:
    """Return the body of the kernel that combines parts: thread blocks for rows of results."""
    threads = kernel.spec.value_dim // COMBINE_VECTOR
    warps = -(-threads // WARP_LANES)

    @T.prim_func(check_well_formed=False)
    def combine():
        T.device_entry()
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.spec.batch * kernel.spec.kv_heads * kernel.group_rows])
        warp = T.warp_id([warps])
        lane = T.lane_id([WARP_LANES])
        if kernel.pdl:
            T.ptx.griddepcontrol.launch_dependents()
            T.ptx.griddepcontrol.wait()
        if warp * WARP_LANES + lane < threads:
            args = T.meta_var(_flat(buffers))
            _combine(kernel, args, workspace, (block, (warp * WARP_LANES + lane) * COMBINE_VECTOR))

    return combine.body


def build(kernel: DecodeKernel, arguments: Sequence[tuple[str, tuple[int, ...], str]]) -> tvm.IRModule:
    """Return a module whose `main` is the attention, a function of these arguments: name, shape and dtype of each."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in arguments}
    workspace = Workspace.of(kernel)

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": kernel.params.blocks})
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.grid])
        warp = T.warp_id([kernel.params.warps])
        lane = T.lane_id([WARP_LANES])
        args = T.meta_var(_flat(buffers))
        _run(kernel, args, workspace, (block, warp, lane))

    body = main.body
    if kernel.params.split_k > 1:
        body = tirx.SeqStmt(
            [tirx.AllocBuffer(workspace.results), tirx.AllocBuffer(workspace.stats), body, _combining(kernel, buffers, workspace)]
        )
    func = tirx.PrimFunc(list(buffers.values()), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})


def _flat(buffers: dict[str, Any]) -> Args:
    """Return the arguments with one dimension each, for offsets that are computed once for many accesses."""

    def flat(name: str) -> Any:
        buffer = buffers.get(name)
        return None if buffer is None else T.decl_buffer((math.prod(map(int, buffer.shape)),), str(buffer.dtype), data=buffer.data)

    return Args(flat("Q"), flat("K"), flat("V"), flat("page_table"), flat("lengths"), flat("O"))
