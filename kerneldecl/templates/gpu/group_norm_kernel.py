"""Owns the kernels of group norms on GPUs: sums of each thread block's share of groups, and the normalisation that reads them.

Knows nothing of how parameters are chosen.

Threads stand in rows. Where channels are last, a row covers the channels of whole groups, and each thread has neighbouring channels, of
which it keeps sums apart; rows take different pixels. Where pixels are last, a group is one stretch of memory, and a thread block has one
row. Sums are of distances to the group's first element, so that their squares lose nothing to a large mean (Chan, Golub, LeVeque,
Algorithms for computing the sample variance, 1983); so is what is scaled. Each sum has one order.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.group_norm import FACTORS, STATISTICS
from kerneldecl.compiler.group_norm import activated
from kerneldecl.templates.gpu.group_norm_config import Args, Block, GroupNormKernel
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.shared.fast_math import with_fast_activations

ALL_LANES = 0xFFFFFFFF


@T.inline
def _begin(kernel):
    """Let the next kernel start as soon as SMs have room: it waits, as this one does, until its preceding kernel has ended."""
    if kernel.pdl:
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()


def _smem(kernel: GroupNormKernel) -> tuple[Any, Any]:
    """Return the cells of a thread block's sums, and the sums or factors of its groups, in shared memory."""
    params, groups = kernel.params, STATISTICS * kernel.groups
    pool = T.SMEMPool()
    cells = pool.alloc((max(STATISTICS * params.rows * kernel.cells, params.parts(kernel.sizes) * groups),), "float32", align=16)
    found = pool.alloc((FACTORS * kernel.groups,), "float32", align=16)
    pool.commit()
    return cells, found


def _registers(kernel: GroupNormKernel) -> tuple[Any, Any]:
    """Return a thread's loaded elements, and its sums."""
    held = T.alloc_local((kernel.params.unroll * kernel.params.width,), kernel.spec.dtype)
    return held, T.alloc_local((STATISTICS * kernel.kept,), "float32")


def _block(kernel: GroupNormKernel, args: Args, block_id: Any, thread: Any) -> Block:
    unit, chunk = block_id // kernel.params.chunks, block_id % kernel.params.chunks
    return Block(kernel, args, unit // kernel.slices, unit % kernel.slices * kernel.groups, chunk, thread)


def _result(kernel: GroupNormKernel, value: Any) -> Any:
    return T.cast(with_fast_activations(activated(kernel.spec.activation, value), kernel.spec.dtype), kernel.spec.dtype)


@T.inline
def _load(block, held, batch):
    """Load a batch of vectors; where there is none, nothing."""
    params = T.meta_var(block.kernel.params)
    for u in T.unroll(params.unroll):
        step = T.meta_var(batch * params.unroll + u)
        if T.And(step < block.kernel.steps, block.has(step)):
            for w in T.vectorized(params.width):
                held[u * params.width + w] = block.args.x[block.offset(step) + w]


@T.inline
def _sum_up(block, held, sums):
    """Add up a thread's elements, and their squares, as distances to the first elements of their groups."""
    kernel, params, sizes = meta_vars((block.kernel, block.kernel.params, block.kernel.sizes))
    first = T.alloc_local((kernel.kept,), "float32")
    for w in T.unroll(kernel.kept):
        channel = T.meta_var(T.min(block.first_channel + w, sizes.channels - 1) if kernel.spec.is_channels_last else 0)
        group = T.meta_var(channel // sizes.size if kernel.spec.is_channels_last else block.first_group)
        first[w] = T.cast(block.args.x[block.first_element(group)], "float32")
        for k in T.unroll(STATISTICS):
            sums[k * kernel.kept + w] = T.float32(0)
    for batch in T.serial(-(-kernel.steps // params.unroll)):
        _load(block, held, batch)
        for u in T.unroll(params.unroll):
            step = T.meta_var(batch * params.unroll + u)
            if T.And(step < kernel.steps, block.has(step)):
                for w in T.unroll(params.width):
                    at = T.meta_var(w % kernel.kept)
                    distance: T.float32 = T.cast(held[u * params.width + w], "float32") - first[at]
                    sums[at] = sums[at] + distance
                    sums[kernel.kept + at] = sums[kernel.kept + at] + distance * distance


@T.inline
def _combine_rows(block, cells, sums):
    """Add up the sums of a thread block's rows in shared memory, in the cells of the first row."""
    kernel, params = T.meta_var((block.kernel, block.kernel.params))
    if block.row < params.rows:
        for k in T.unroll(STATISTICS):
            for w in T.unroll(kernel.kept):
                cells[(k * params.rows + block.row) * kernel.cells + block.column * kernel.kept + w] = sums[k * kernel.kept + w]
    T.cuda.cta_sync()
    if params.rows > 1:
        for i in T.serial(-(-STATISTICS * kernel.cells // params.threads)):
            at = T.meta_var(i * params.threads + block.thread)
            if at < STATISTICS * kernel.cells:
                place = T.meta_var(at // kernel.cells * (params.rows * kernel.cells) + at % kernel.cells)
                total = T.alloc_local((1,), "float32")
                total[0] = cells[place]
                for row in T.unroll(params.rows - 1):
                    total[0] = total[0] + cells[place + (row + 1) * kernel.cells]
                cells[place] = total[0]
        T.cuda.cta_sync()


@T.inline
def _combine_cells(block, cells, found):
    """Add up the cells of each group; `found` gets both sums of it, behind one another."""
    kernel, params = T.meta_var((block.kernel, block.kernel.params))
    lanes = T.meta_var(kernel.lanes_of_group)
    at_once = T.meta_var(params.threads // lanes)
    total = T.alloc_local((1,), "float32")
    for i in T.serial(-(-STATISTICS * kernel.groups // at_once)):
        sum_of = T.meta_var(i * at_once + block.thread // lanes)
        k, group = meta_vars((sum_of // kernel.groups, sum_of % kernel.groups))
        total[0] = T.float32(0)
        for j in T.unroll(-(-kernel.cells_of_group // lanes)):
            cell = T.meta_var(j * lanes + block.thread % lanes)
            if T.And(sum_of < STATISTICS * kernel.groups, cell < kernel.cells_of_group):
                total[0] = total[0] + cells[k * (params.rows * kernel.cells) + group * kernel.cells_of_group + cell]
        for bit in T.unroll(lanes.bit_length() - 1):
            total[0] = total[0] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[0], 1 << bit, 32, 32)
        if T.And(sum_of < STATISTICS * kernel.groups, block.thread % lanes == 0):
            found[k * kernel.groups + group] = total[0]


@T.inline
def _combine_chunks(block, workspace, cells, found):
    """Add up what the thread blocks of all chunks have left of a thread block's groups."""
    kernel, params = T.meta_var((block.kernel, block.kernel.params))
    parts, items = meta_vars((params.parts(kernel.sizes), STATISTICS * kernel.groups))
    each = T.meta_var(-(-params.chunks // parts))
    total = T.alloc_local((1,), "float32")
    for i in T.serial(-(-parts * items // params.threads)):
        at = T.meta_var(i * params.threads + block.thread)
        if at < parts * items:
            k, group, part = meta_vars((at % items // kernel.groups, at % kernel.groups, at // items))
            total[0] = T.float32(0)
            for c in T.unroll(each):
                chunk = T.meta_var(part * each + c)
                if chunk < params.chunks:
                    total[0] = total[0] + workspace[block.image, chunk, k, block.first_group + group]
            cells[at] = total[0]
    T.cuda.cta_sync()
    for i in T.serial(-(-items // params.threads)):
        at = T.meta_var(i * params.threads + block.thread)
        if at < items:
            total[0] = cells[at]
            for part in T.unroll(parts - 1):
                total[0] = total[0] + cells[(part + 1) * items + at]
            found[at] = total[0]


@T.inline
def _to_factors(block, found):
    """Make of the sums of each group its mean, as a distance to its first element, 1 / sqrt(variance + eps), and that element."""
    kernel, params = T.meta_var((block.kernel, block.kernel.params))
    T.cuda.cta_sync()
    for i in T.serial(-(-kernel.groups // params.threads)):
        group = T.meta_var(i * params.threads + block.thread)
        if group < kernel.groups:
            mean: T.float32 = found[group] * T.float32(1 / kernel.group_elements)
            square: T.float32 = found[kernel.groups + group] * T.float32(1 / kernel.group_elements)
            variance: T.float32 = square - mean * mean
            found[group] = mean
            # What rounding leaves below zero is zero; NaN stays.
            found[kernel.groups + group] = T.rsqrt(T.Select(variance < T.float32(0), T.float32(0), variance) + T.float32(kernel.spec.eps))
            found[2 * kernel.groups + group] = T.cast(block.args.x[block.first_element(block.first_group + group)], "float32")
    T.cuda.cta_sync()


@T.inline
def _take_factors(block, found, place, factors):
    """Take what a channel's elements are computed with, in a place of a thread's registers."""
    w, channel, group = meta_vars(place)
    first, scale, shift = meta_vars(factors)
    groups = T.meta_var(block.kernel.groups)
    first[w] = found[2 * groups + group]
    scale[w] = found[groups + group] * T.cast(block.args.gamma[channel], "float32")
    shift[w] = T.cast(block.args.beta[channel], "float32") - found[group] * scale[w]


@T.inline
def _store(block, held, u, offset, factors):
    """Normalise the elements of a thread's `u`-th vector, and store them."""
    kernel, params = T.meta_var((block.kernel, block.kernel.params))
    first, scale, shift = meta_vars(factors)
    out = T.alloc_local((params.width,), kernel.spec.dtype)
    for w in T.unroll(params.width):
        at = T.meta_var(w % kernel.kept)
        value: T.float32 = (T.cast(held[u * params.width + w], "float32") - first[at]) * scale[at] + shift[at]
        out[w] = _result(kernel, value)
    for w in T.vectorized(params.width):
        block.args.y[offset + w] = out[w]


@T.inline
def _normalise(block, held, found):
    """Normalise a thread's elements, of which the first batch is loaded, and store them."""
    kernel, params, sizes = meta_vars((block.kernel, block.kernel.params, block.kernel.sizes))
    first, scale, shift = [T.meta_var(T.alloc_local((kernel.kept,), "float32")) for _ in range(3)]
    if kernel.spec.is_channels_last:
        for w in T.unroll(params.width):
            channel = T.meta_var(T.min(block.first_channel + w, sizes.channels - 1))
            _take_factors(block, found, (w, channel, channel // sizes.size - block.first_group), (first, scale, shift))
    for batch in T.serial(-(-kernel.steps // params.unroll)):
        for u in T.unroll(params.unroll):
            step = T.meta_var(batch * params.unroll + u)
            if T.And(step < kernel.steps, block.has(step)):
                if not kernel.spec.is_channels_last:
                    channel = T.meta_var(block.first_group * sizes.size + block.within(step) // sizes.pixels)
                    _take_factors(block, found, (0, channel, 0), (first, scale, shift))
                _store(block, held, u, block.offset(step), (first, scale, shift))
        if batch + 1 < -(-kernel.steps // params.unroll):
            _load(block, held, batch + 1)


@T.inline
def _sums_kernel(kernel, args, workspace, block_id, thread):
    """Leave the sums of a thread block's share of its groups in the workspace."""
    params = T.meta_var(kernel.params)
    cells, found = meta_vars(_smem(kernel))
    block = T.meta_var(_block(kernel, args, block_id, thread))
    held, sums = meta_vars(_registers(kernel))
    _begin(kernel)
    _sum_up(block, held, sums)
    _combine_rows(block, cells, sums)
    _combine_cells(block, cells, found)
    T.cuda.cta_sync()
    for i in T.serial(-(-STATISTICS * kernel.groups // params.threads)):
        at = T.meta_var(i * params.threads + thread)
        if at < STATISTICS * kernel.groups:
            workspace[block.image, block.chunk, at // kernel.groups, block.first_group + at % kernel.groups] = found[at]


@T.inline
def _normalising_kernel(kernel, args, workspace, block_id, thread):
    """Read the sums of all chunks, and normalise a thread block's share of its groups."""
    cells, found = meta_vars(_smem(kernel))
    block = T.meta_var(_block(kernel, args, block_id, thread))
    held, _ = meta_vars(_registers(kernel))
    _begin(kernel)
    _load(block, held, 0)
    _combine_chunks(block, workspace, cells, found)
    _to_factors(block, found)
    _normalise(block, held, found)


@T.inline
def _whole_kernel(kernel, args, _, block_id, thread):
    """Do both for whole groups; what one batch of loads holds is read once."""
    cells, found = meta_vars(_smem(kernel))
    block = T.meta_var(_block(kernel, args, block_id, thread))
    held, sums = meta_vars(_registers(kernel))
    _begin(kernel)
    _sum_up(block, held, sums)
    if kernel.steps > kernel.params.unroll:
        _load(block, held, 0)
    _combine_rows(block, cells, sums)
    _combine_cells(block, cells, found)
    _to_factors(block, found)
    _normalise(block, held, found)


def _body(kernel: GroupNormKernel, buffers: dict[str, Any], workspace: Any, work: Any) -> Any:
    """Return the body of a kernel that does some work."""
    grid, warps = kernel.params.units(kernel.sizes) * kernel.params.chunks, kernel.params.threads // WARP_LANES

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([grid])
        warp = T.warp_id([warps])
        lane = T.lane_id([WARP_LANES])
        args = T.meta_var(_flat(buffers))
        work(kernel, args, workspace, block, warp * WARP_LANES + lane)

    return main.body


def build(kernel: GroupNormKernel, arguments: list[tuple[str, tuple[int, ...], str]]) -> tvm.IRModule:
    """Return a module whose `main` is the norm, a function of these arguments: name, shape and dtype of each."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in arguments}
    if kernel.params.chunks == 1:
        body = _body(kernel, buffers, None, _whole_kernel)
    else:
        shape = (kernel.sizes.images, kernel.params.chunks, STATISTICS, kernel.sizes.groups)
        workspace = tirx.decl_buffer(shape, "float32", "chunk_sums")
        kernels = [_body(kernel, buffers, workspace, work) for work in (_sums_kernel, _normalising_kernel)]
        body = tirx.SeqStmt([tirx.AllocBuffer(workspace), *kernels])
    func = tirx.PrimFunc(list(buffers.values()), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})


def _flat(buffers: dict[str, Any]) -> Args:
    """Return the arguments with one dimension each."""
    shapes = [(math.prod(map(int, buffer.shape)),) for buffer in buffers.values()]
    return Args(*(T.decl_buffer(shape, str(each.dtype), data=each.data) for shape, each in zip(shapes, buffers.values(), strict=True)))
