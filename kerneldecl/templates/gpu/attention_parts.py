"""Owns attention whose keys are divided among CTAs: what each leaves in a workspace, and the second kernel, which combines that.

Knows nothing of how the results of a part came about. They are distances to maxima of their own; each sum has one order. The scheme is that
of Dao et al., Flash-Decoding for long-context inference, 2023.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.tensor_cores import FRAGMENT
from kerneldecl.templates.gpu.attention_config import AttentionTcKernel
from kerneldecl.templates.gpu.attention_tile import Warp
from kerneldecl.templates.hopper.attention_softmax import finite, highest_of
from kerneldecl.templates.hopper.epilogue import meta_vars

COMBINE_VECTOR = 4
"""Elements of a row of results that a thread of the second kernel combines: 16 bytes."""


class Workspace(NamedTuple):
    """What the parts of all rows' keys leave, by part, head of queries and row."""

    results: Any
    stats: Any
    """The logarithm, to base two, of what powers are multiples of, and the sum of powers."""

    @classmethod
    def of(cls, kernel: AttentionTcKernel) -> Workspace:
        shape = (kernel.params.split_k, kernel.all_heads, kernel.row_tiles * kernel.params.block_m)
        return cls(
            tirx.decl_buffer((*shape, kernel.rows.value_columns), "float32", "parts"), tirx.decl_buffer((*shape, 2), "float32", "part_sums")
        )


def store_part(warp: Warp, workspace: Workspace, part: Any) -> None:
    """Store a warp's results of a part of its rows' keys, not divided by their sums, and one warp's sums."""
    kernel, tile = warp.kernel, warp.tile
    head = tile.batch * kernel.spec.heads + tile.head
    first_column = warp.column * kernel.rows.warp_columns + warp.lane % 4 * 2
    for number, (softmax, results, _, _) in enumerate(warp.fragments):
        for half in range(2):
            row = warp.first_row(number) + warp.lane // 4 + half * (FRAGMENT // 2)
            with T.If(T.And(warp.lane % 4 == 0, warp.column == 0)), T.Then():
                T.buffer_store(workspace.stats, softmax.reference[half] * softmax.scale_log2, [part, head, row, 0])
                T.buffer_store(workspace.stats, softmax.total[half * 2], [part, head, row, 1])
            for i in range(half * 2, kernel.results, 4):
                for place in range(2):
                    value = results[i + place] if softmax.scales is None else results[i + place] * softmax.scales[2]
                    T.buffer_store(workspace.results, value, [part, head, row, first_column + (i // 4 * 8 + place)])


@T.inline
def _add_parts(kernel, workspace, at, found, sums):
    """Add up neighbouring elements of a row over all parts of its keys; `sums` gets the sum of powers, and what they are multiples of."""
    head, row, column = meta_vars(at)
    parts = T.meta_var(kernel.params.split_k)
    theirs = T.alloc_local((parts * COMBINE_VECTOR,), "float32")
    for part in T.unroll(parts):
        for x in T.vectorized(COMBINE_VECTOR):
            theirs[part * COMBINE_VECTOR + x] = workspace.results[part, head, row, column + x]
    sums[1] = workspace.stats[0, head, row, 0]
    for part in T.unroll(parts - 1):
        sums[1] = highest_of(sums[1], workspace.stats[part + 1, head, row, 0])
    sums[1] = finite(sums[1])
    sums[0] = T.float32(0)
    for x in T.unroll(COMBINE_VECTOR):
        found[x] = T.float32(0)
    for part in T.unroll(parts):
        factor: T.float32 = T.exp2(workspace.stats[part, head, row, 0] - sums[1])
        sums[0] = sums[0] + workspace.stats[part, head, row, 1] * factor
        for x in T.unroll(COMBINE_VECTOR):
            found[x] = found[x] + theirs[part * COMBINE_VECTOR + x] * factor


@T.inline
def _combine(kernel, workspace, row_of_all, column):
    """Have a thread combine all parts of some elements of a row of results, and store them."""
    spec = T.meta_var(kernel.spec)
    row, head = meta_vars((row_of_all % spec.queries, row_of_all // spec.queries))
    found, sums = T.alloc_local((COMBINE_VECTOR,), "float32"), T.alloc_local((2,), "float32")
    _add_parts(kernel, workspace, (head, row, column), found, sums)
    inverse: T.float32 = T.Select(sums[0] == T.float32(0), T.float32(0), T.float32(1) / sums[0])
    o = T.meta_var(kernel.arguments["O"])
    for x in T.vectorized(COMBINE_VECTOR):
        o[spec.index(head // spec.heads, head % spec.heads, row, column + x)] = T.cast(found[x] * inverse, spec.result_dtype)
    if spec.has_logsumexp:
        logarithms = T.meta_var(kernel.arguments["logsumexp"])
        if column == 0:
            log2 = T.meta_var(T.log2(sums[0]) + sums[1] - T.float32(kernel.power_log2))
            logarithms[head // spec.heads, head % spec.heads, row] = log2 * T.float32(math.log(2))


def combining(kernel: AttentionTcKernel, workspace: Workspace) -> Any:
    """Return the body of the kernel that combines parts: a CTA for each row of results."""
    spec, threads = kernel.spec, kernel.spec.value_dim // COMBINE_VECTOR

    @T.prim_func(check_well_formed=False)
    def second():
        T.device_entry()
        if kernel.has_pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.all_heads * spec.queries])
        warp = T.warp_id([-(-threads // WARP_LANES)])
        lane = T.lane_id([WARP_LANES])
        if kernel.has_pdl:
            T.ptx.griddepcontrol.launch_dependents()
            T.ptx.griddepcontrol.wait()
        if warp * WARP_LANES + lane < threads:
            _combine(kernel, workspace, block, (warp * WARP_LANES + lane) * COMBINE_VECTOR)

    return second.body
