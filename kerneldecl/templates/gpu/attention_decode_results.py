"""Owns how results of attention against a KV cache are combined: of a thread block's warps, of a cluster, and of all that share keys.

Knows nothing of how they came about. Parts of a row's keys have results that are distances to maxima of their own; each sum has one order.
Warps combine theirs in shared memory; the thread blocks of a cluster read each other's; what is left goes to a second kernel, which is
`attention_decode_combine`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.gpu.attention_decode_combine import finite, meet
from kerneldecl.templates.gpu.attention_decode_warp import ALL_LANES
from kerneldecl.templates.hopper.epilogue import meta_vars

REMOTE_LOAD = "ld.shared::cluster{}.f32"


@T.inline
def leave(warp):
    """Have all warps leave their results in shared memory, as distances to the block's maxima, and the sums of their rows."""
    kernel, registers, smem = T.meta_var((warp.kernel, warp.registers, warp.smem))
    params = T.meta_var(kernel.params)
    group, lane = meta_vars((warp.group, warp.lane))
    for i in T.unroll(params.row_tiles * 2):
        for bit in T.unroll(3):
            registers.total[i] = registers.total[i] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), registers.total[i], 4 << bit, 32, 32)
        if lane < 4:
            smem.references[group, warp.first_row + i // 2 * 8 + lane * 2 + i % 2] = registers.reference[i]
    T.cuda.cta_sync()
    for i in T.unroll(params.row_tiles * 2):
        row = T.meta_var(warp.first_row + i // 2 * 8 + lane % 4 * 2 + i % 2)
        highest: T.float32 = smem.references[0, row]
        for other in T.unroll(params.groups - 1):
            highest = T.max(highest, smem.references[other + 1, row])
        registers.partial[i] = T.exp2((registers.reference[i] - finite(highest)) * T.float32(kernel.scale_log2))
        if lane < 4:
            smem.totals[group, row] = registers.total[i] * registers.partial[i]
    for i in T.unroll(params.row_tiles * kernel.value_steps * 4):
        tile, step = meta_vars((i // (kernel.value_steps * 4), i // 4 % kernel.value_steps))
        row = T.meta_var(warp.first_row + tile * 8 + lane % 4 * 2 + i % 2)
        smem.results[group, row, step * 16 + i % 4 // 2 * 8 + lane // 4] = registers.acc[i] * registers.partial[tile * 2 + i % 2]
    T.cuda.cta_sync()


@T.inline
def _add_sums(warp):
    """Find the rows' maxima, and add up their sums, in the place of the first group's."""
    params, smem = T.meta_var((warp.kernel.params, warp.smem))
    for i in T.serial(-(-params.block_rows // params.threads)):
        row = T.meta_var(i * params.threads + warp.thread)
        if row < params.block_rows:
            for other in T.unroll(params.groups - 1):
                smem.references[0, row] = T.max(smem.references[0, row], smem.references[other + 1, row])
                smem.totals[0, row] = smem.totals[0, row] + smem.totals[other + 1, row]


@T.inline
def add_groups(warp):
    """Have a thread block add up its groups' results, in the place of the first one's."""
    params, smem, pairs = meta_vars((warp.kernel.params, warp.smem, warp.kernel.spec.value_dim // 2))
    _add_sums(warp)
    sums = T.alloc_local((2,), "float32")
    for i in T.serial(-(-params.block_rows * pairs // params.threads)):
        at = T.meta_var(i * params.threads + warp.thread)
        if at < params.block_rows * pairs:
            for x in T.unroll(2):
                sums[x] = T.float32(0)
            for each in T.unroll(params.groups * 2):
                sums[each % 2] = sums[each % 2] + smem.results[each // 2, at // pairs, at % pairs * 2 + each % 2]
            for x in T.unroll(2):
                smem.results[0, at // pairs, at % pairs * 2 + x] = sums[x]


@T.inline
def _load(kernel, buffer, index, rank, registers, count):
    """Load one or two neighbouring float32 from the shared memory of a thread block of the cluster."""
    if kernel.params.cluster == 1:
        for x in T.unroll(count):
            registers[x] = buffer[(*index[:-1], index[-1] + x)]
    else:
        address = T.alloc_local((1,), "uint32")
        T.ptx.mapa.shared__cluster.u32(address[0], T.cuda.cvta_generic_to_shared(buffer.ptr_to(list(index))), T.uint32(rank))
        T.ptx[REMOTE_LOAD.format(".v2" if count == 2 else "")](*[registers[x] for x in range(count)], address[0])


@T.inline
def _add_blocks(warp, row, column, found):
    """Add up an element pair of a row over the thread blocks of a cluster; `found` gets both, the sum of powers, and the maximum."""
    kernel, smem = T.meta_var((warp.kernel, warp.smem))
    cluster = T.meta_var(kernel.params.cluster)
    references, values = T.alloc_local((cluster,), "float32"), T.alloc_local((2,), "float32")
    for x in T.unroll(3):
        found[x] = T.float32(0)
    found[3] = tirx.const(float("-inf"), "float32")
    for rank in T.unroll(cluster):
        _load(kernel, smem.references, (0, row), rank, values, 1)
        references[rank] = values[0]
        found[3] = T.max(found[3], values[0])
    for rank in T.unroll(cluster):
        factor: T.float32 = T.exp2((references[rank] - finite(found[3])) * T.float32(kernel.scale_log2))
        _load(kernel, smem.results, (0, row, column), rank, values, 2)
        for x in T.unroll(2):
            found[x] = found[x] + values[x] * factor
        _load(kernel, smem.totals, (0, row), rank, values, 1)
        found[2] = found[2] + values[0] * factor


@T.inline
def store(warp, workspace, unit, part, rank):
    """Have the thread blocks of a cluster combine their results and store a share each: in O, or for the kernel that combines parts."""
    kernel, params, columns = meta_vars((warp.kernel, warp.kernel.params, warp.kernel.spec.value_dim))
    batch, head, first = meta_vars(warp.place)
    pairs = T.meta_var(params.block_rows * columns // 2)
    found = T.alloc_local((4,), "float32")
    meet(params.cluster)
    for i in T.serial(-(-pairs // (params.threads * params.cluster))):
        at = T.meta_var((i * params.cluster + rank) * params.threads + warp.thread)
        row, column = meta_vars((at // (columns // 2), at % (columns // 2) * 2))
        if T.And(at < pairs, first + row < kernel.group_rows):
            _add_blocks(warp, row, column, found)
            if kernel.parts == 1:
                inverse: T.float32 = T.Select(found[2] == T.float32(0), T.float32(0), T.float32(1) / found[2])
                o = T.meta_var(kernel.query_offset(batch, head, first + row, columns) + column)
                for x in T.vectorized(2):
                    warp.args.o[o + x] = T.cast(found[x] * inverse, kernel.spec.dtype)
            else:
                for x in T.vectorized(2):
                    workspace.results[unit, part, row, column + x] = found[x]
                if column == 0:
                    workspace.stats[unit, part, row, 0] = found[3]
                    workspace.stats[unit, part, row, 1] = found[2]
    if params.cluster > 1:
        # No thread block leaves while others still read its shared memory.
        meet(params.cluster)
