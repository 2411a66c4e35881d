"""Owns the second kernel of attention against a KV cache, which combines the results of parts of the keys, the workspace between
them, and how the thread blocks of a cluster meet.

Knows nothing of how parts came about. Their results are distances to maxima of their own; each sum has one order.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.shared.cache_attention import CacheAttention

COMBINE_VECTOR = 4
"""Elements of a row of results that a thread of the second kernel combines: 16 bytes."""
AT_ONCE = 16
"""Parts whose results a thread loads before it uses the first."""


class Args(NamedTuple):
    """Flat buffers of the function's arguments; `table` and `lengths` are None where there are none."""

    q: Any
    k: Any
    v: Any
    table: Any
    lengths: Any
    o: Any


def finite(value: Any) -> Any:
    """Return a row's reference, or zero for a row that has seen no key yet: then each score's distance to it is minus infinity."""
    return T.Select(value == tirx.const(float("-inf"), "float32"), T.float32(0), value)


class Workspace(NamedTuple):
    """What clusters that share keys leave for the kernel that combines it, by unit, part of the keys, and row."""

    results: Any
    stats: Any
    """The maximum that results are distances to, and the sum of powers."""

    @classmethod
    def of(cls, kernel: CacheAttention) -> Workspace:
        shape = (kernel.units, kernel.parts, kernel.params.block_rows)
        return cls(
            tirx.decl_buffer((*shape, kernel.spec.value_dim), "float32", "parts"), tirx.decl_buffer((*shape, 2), "float32", "part_sums")
        )


@T.inline
def meet(cluster):
    """Have all threads of a thread block, or of all of its cluster, wait for each other."""
    if cluster == 1:
        T.cuda.cta_sync()
    else:
        # Lanes, or the warp of a producer, may come here apart, so the barrier is not the aligned one.
        T.ptx.barrier.cluster.arrive.release()
        T.ptx.barrier.cluster.wait.acquire()


@T.inline
def _add_parts(kernel, workspace, at, found):
    """Add up neighbouring elements of a row over all parts of its keys; `found` gets them, and the sum of powers behind them."""
    unit, row, column, highest = meta_vars(at)
    parts = T.meta_var(kernel.parts)
    theirs = T.alloc_local((AT_ONCE * COMBINE_VECTOR,), "float32")
    for x in T.unroll(COMBINE_VECTOR + 1):
        found[x] = T.float32(0)
    for group in T.serial(-(-parts // AT_ONCE)):
        for i in T.unroll(AT_ONCE):
            part = T.meta_var(T.min(group * AT_ONCE + i, parts - 1))
            for x in T.vectorized(COMBINE_VECTOR):
                theirs[i * COMBINE_VECTOR + x] = workspace.results[unit, part, row, column + x]
        for i in T.unroll(AT_ONCE):
            part = T.meta_var(T.min(group * AT_ONCE + i, parts - 1))
            if group * AT_ONCE + i < parts:
                factor: T.float32 = T.exp2((workspace.stats[unit, part, row, 0] - highest) * T.float32(kernel.scale_log2))
                found[COMBINE_VECTOR] = found[COMBINE_VECTOR] + workspace.stats[unit, part, row, 1] * factor
                for x in T.unroll(COMBINE_VECTOR):
                    found[x] = found[x] + theirs[i * COMBINE_VECTOR + x] * factor


@T.inline
def combine(kernel, o, workspace, row_of_all, column):
    """Have a thread combine all parts of some elements of a row of results, and store them."""
    row, head = meta_vars((row_of_all % kernel.group_rows, row_of_all // kernel.group_rows))
    unit, place = meta_vars((head * kernel.row_blocks + row // kernel.params.block_rows, row % kernel.params.block_rows))
    highest: T.float32 = workspace.stats[unit, 0, place, 0]
    for part in T.unroll(kernel.parts - 1):
        highest = T.max(highest, workspace.stats[unit, part + 1, place, 0])
    found = T.alloc_local((COMBINE_VECTOR + 1,), "float32")
    _add_parts(kernel, workspace, (unit, place, column, finite(highest)), found)
    total = T.meta_var(found[COMBINE_VECTOR])
    inverse: T.float32 = T.Select(total == T.float32(0), T.float32(0), T.float32(1) / total)
    at = T.meta_var(kernel.query_offset(head // kernel.spec.kv_heads, head % kernel.spec.kv_heads, row, kernel.spec.value_dim) + column)
    for x in T.vectorized(COMBINE_VECTOR):
        o[at + x] = T.cast(found[x] * inverse, kernel.spec.dtype)


def combining(kernel: CacheAttention, buffers: dict[str, Any], workspace: Workspace) -> Any:
    """Return the body of the kernel that combines parts: thread blocks for rows of results."""
    threads = kernel.spec.value_dim // COMBINE_VECTOR
    warps = -(-threads // WARP_LANES)

    @T.prim_func(check_well_formed=False)
    def second():
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
            args = T.meta_var(flat_arguments(buffers))
            combine(kernel, args.o, workspace, block, (warp * WARP_LANES + lane) * COMBINE_VECTOR)

    return second.body


def flat_arguments(buffers: dict[str, Any]) -> Args:
    """Return the arguments with one dimension each, for offsets that are computed once for many accesses."""

    def flat(name: str) -> Any:
        buffer = buffers.get(name)
        return None if buffer is None else T.decl_buffer((math.prod(map(int, buffer.shape)),), str(buffer.dtype), data=buffer.data)

    return Args(flat("Q"), flat("K"), flat("V"), flat("page_table"), flat("lengths"), flat("O"))
