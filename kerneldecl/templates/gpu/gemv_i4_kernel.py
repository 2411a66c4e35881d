"""Owns the TIRx kernel of a GEMV with 4-bit weights: each warp streams k-tiles of its rows through a ring of stages in shared memory.

Knows nothing of which computations it is for, nor how parameters are chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.params import I4_STEP, I4_STEP_BYTES
from kerneldecl.compiler.intrinsics.int4_dot import (
    bias_source,
    cp_async_source,
    dot_rows_source,
    permute_registers_source,
    permute_source,
    prefetch_source,
    reduce_source,
)
from kerneldecl.templates.gpu.gemv_i4_config import QUADS, X_VECTORS, Kernel

LINE_BYTES = 128
"""Bytes of one line of L2, which a prefetch loads."""


class _Args(NamedTuple):
    """Buffers of the function's arguments."""

    packed: Any
    scale: Any
    x: Any
    y: Any


class _Smem(NamedTuple):
    """Buffers in shared memory."""

    weights: Any
    """Stages of all warps, with a row of I4_STEP_BYTES for each of their rows."""
    scales: Any
    x: Any
    """The vector in the order in which lanes multiply by it."""
    biases: Any
    """Initial accumulators by k-tile and quad."""
    partials: Any
    """Partial results by row and warp."""


class _Warp(NamedTuple):
    """A warp's view of the kernel."""

    kernel: Kernel
    args: _Args
    smem: _Smem
    block: Any
    warp: Any
    lane: Any

    @property
    def thread(self) -> Any:
        return self.warp * WARP_LANES + self.lane

    @property
    def first_k_tile(self) -> Any:
        return self.warp % self.kernel.params.warps_k

    @property
    def first_tile(self) -> Any:
        return self.block * self.kernel.warp_groups + self.warp // self.kernel.params.warps_k

    @property
    def first_stage(self) -> Any:
        return self.warp * self.kernel.params.stages

    def row(self, tile: Any, number: Any) -> Any:
        """Return a row of a tile, the last row of the weights in place of those beyond it."""
        rows, n = self.kernel.params.rows, self.kernel.n
        return _at_most(tile * rows + number, n - 1, n % rows == 0)


def _at_most(index: Any, bound: int, is_within: bool) -> Any:
    return index if is_within else T.min(index, bound)


@T.inline
def _fetch(warp, tile, k_tile, stage):
    """Start a warp's cp.async of one k-tile of a tile, with zeros beyond the end of k."""
    kernel = T.meta_var(warp.kernel)
    rows, lane = T.meta_var(kernel.params.rows), T.meta_var(warp.lane)
    row_bytes = T.meta_var(kernel.k // 2)
    per_copy = T.meta_var(kernel.scales_per_copy)
    copies = T.meta_var(kernel.scales // per_copy)
    is_whole = T.meta_var(kernel.k % (kernel.params.warps_k * I4_STEP) == 0)
    if tile < kernel.tiles:
        byte = T.meta_var(k_tile * I4_STEP_BYTES + lane * VECTOR_BYTES)
        for r in T.unroll(rows):
            T.cuda.func_call(
                cp_async_source(VECTOR_BYTES)[0],
                warp.smem.weights.ptr_to([stage, r, lane * VECTOR_BYTES]),
                warp.args.packed.ptr_to([warp.row(tile, r), _at_most(byte, row_bytes - VECTOR_BYTES, is_whole)]),
                VECTOR_BYTES if is_whole else T.Select(byte < row_bytes, VECTOR_BYTES, 0),
                source_code=cp_async_source(VECTOR_BYTES)[1],
            )
        if lane < rows * copies:
            first = T.meta_var(k_tile * kernel.scales + lane % copies * per_copy)
            T.cuda.func_call(
                cp_async_source(2 * per_copy)[0],
                warp.smem.scales.ptr_to([stage, lane // copies, lane % copies * per_copy]),
                warp.args.scale.ptr_to([warp.row(tile, lane // copies), _at_most(first, kernel.k // kernel.group - per_copy, is_whole)]),
                2 * per_copy if is_whole else T.Select(first < kernel.k // kernel.group, 2 * per_copy, 0),
                source_code=cp_async_source(2 * per_copy)[1],
            )
    T.ptx.cp.async_.commit_group()


@T.inline
def _advance(kernel, tile, k_tile):
    """Move on to the next k-tile that a warp fetches."""
    k_tile = k_tile + 1
    if k_tile == kernel.warp_k_tiles:
        k_tile = 0
        tile = tile + kernel.tile_stride


@T.inline
def _wait_for_preceding_kernel(warp):
    """Prefetch the first weights to L2, which neither reads nor writes them, and wait until the preceding kernel has ended."""
    kernel, lane, tile = T.meta_var(warp.kernel), T.meta_var(warp.lane), T.meta_var(warp.first_tile)
    # The next kernel may start as soon as SMs have room: it waits, as this one does, until its preceding kernel has ended.
    T.ptx.griddepcontrol.launch_dependents()
    lines = T.meta_var(I4_STEP_BYTES // LINE_BYTES)
    row_bytes = T.meta_var(kernel.k // 2)
    byte = T.meta_var(warp.first_k_tile * I4_STEP_BYTES + lane % lines * LINE_BYTES)
    if T.And(lane < kernel.prefetched_rows * lines, T.And(tile < kernel.tiles, byte < row_bytes)):
        T.cuda.func_call(
            prefetch_source()[0], warp.args.packed.ptr_to([warp.row(tile, lane // lines), byte]), source_code=prefetch_source()[1]
        )
    T.ptx.griddepcontrol.wait()


@T.inline
def _load_x(warp, registers, first):
    """Load X_VECTORS vectors of x per thread from the `first` on, zeros beyond its end."""
    kernel = T.meta_var(warp.kernel)
    words = T.decl_buffer((kernel.k // 2,), "uint32", data=warp.args.x.data)
    for i in T.unroll(X_VECTORS):
        index = T.meta_var(((first + i) * (kernel.params.warps * WARP_LANES) + warp.thread) * 4)
        if index < kernel.k // 2:
            for v in T.vectorized(4):
                registers[i * 4 + v] = words[index + v]
        else:
            for v in T.unroll(4):
                registers[i * 4 + v] = T.uint32(0)


@T.inline
def _store_x(warp, registers, first):
    """Store the vectors that `_load_x` has loaded to shared memory, in the order in which lanes multiply by them."""
    kernel = T.meta_var(warp.kernel)
    for i in T.unroll(X_VECTORS):
        index = T.meta_var((first + i) * (kernel.params.warps * WARP_LANES) + warp.thread)
        if index < kernel.vectors:
            T.cuda.func_call(
                permute_source()[0],
                warp.smem.x.ptr_to([((index // 128 * 4 + index % 4) * WARP_LANES + index % 128 // 4) * 8]),
                registers.ptr_to([i * 4]),
                source_code=permute_source()[1],
            )


@T.inline
def _load_x_of_lane(warp, registers):
    """Load a lane's elements of the warp's only k-tile of x, zeros beyond its end."""
    kernel = T.meta_var(warp.kernel)
    words = T.decl_buffer((kernel.k // 2,), "uint32", data=warp.args.x.data)
    index = T.meta_var(warp.first_k_tile * (I4_STEP // 2) + warp.lane * 16)
    if index < kernel.k // 2:
        for i in T.unroll(4):
            for v in T.vectorized(4):
                registers[i * 4 + v] = words[index + i * 4 + v]
    else:
        for i in T.unroll(16):
            registers[i] = T.uint32(0)


@T.inline
def _share_x(warp, registers):
    """Complete x in shared memory, from the first vectors in registers on, and compute the initial accumulators of all k-tiles."""
    kernel = T.meta_var(warp.kernel)
    threads = T.meta_var(kernel.params.warps * WARP_LANES)
    _store_x(warp, registers, 0)
    for i in T.serial(kernel.x_passes - 1):
        _load_x(warp, registers, (i + 1) * X_VECTORS)
        _store_x(warp, registers, (i + 1) * X_VECTORS)
    T.cuda.cta_sync()
    for i in T.serial(-(-kernel.k_tiles * QUADS // threads)):
        index = T.meta_var(i * threads + warp.thread)
        if index < kernel.k_tiles * QUADS:
            T.cuda.func_call(
                bias_source()[0],
                warp.smem.biases.ptr_to([index]),
                warp.smem.x.ptr_to([index // QUADS * I4_STEP + index % QUADS * 32]),
                source_code=bias_source()[1],
            )
    T.cuda.cta_sync()


@T.inline
def _multiply(warp, accum, x, k_tile, stage):
    """Add the dot products of one k-tile to the accumulators of a warp's rows; `x` are its registers and their initial accumulator."""
    kernel = T.meta_var(warp.kernel)
    dot, source = T.meta_var(dot_rows_source(kernel.params.rows, kernel.group, in_registers=kernel.keeps_x_in_registers))
    weights = T.meta_var(warp.smem.weights.ptr_to([stage, 0, warp.lane * VECTOR_BYTES]))
    scales = T.meta_var(warp.smem.scales.ptr_to([stage, 0, 0]))
    if kernel.keeps_x_in_registers:
        T.cuda.func_call(dot, accum.ptr_to([0]), weights, scales, x[0].ptr_to([0]), x[1], source_code=source)
    elif k_tile < kernel.k_tiles:
        T.cuda.func_call(
            dot,
            accum.ptr_to([0]),
            weights,
            scales,
            warp.smem.x.ptr_to([(k_tile * 4 * WARP_LANES + warp.lane) * 8]),
            warp.smem.biases.ptr_to([k_tile * QUADS]),
            source_code=source,
        )


@T.inline
def _store_rows(warp, accum, tile, iteration):
    """Reduce a warp's accumulators over its lanes, and store its rows: in y, or as partial results in shared memory."""
    params = T.meta_var(warp.kernel.params)
    lanes = T.meta_var(WARP_LANES // params.rows)
    row = T.meta_var(warp.lane // lanes)
    total: T.float32 = T.cuda.func_call(
        reduce_source(params.rows)[0], accum.ptr_to([0]), source_code=reduce_source(params.rows)[1], return_type="float32"
    )
    if warp.lane % lanes == 0:
        if params.warps_k > 1:
            index = T.meta_var(iteration * warp.kernel.warp_groups + warp.warp // params.warps_k)
            warp.smem.partials[(index * params.rows + row) * params.warps_k + warp.warp % params.warps_k] = total
        elif tile * params.rows + row < warp.kernel.n:
            warp.args.y[tile * params.rows + row] = T.cast(total, "float16")


@T.inline
def _reduce_partials(warp):
    """Add up the partial results of a block's rows, always in the same order, and store the rows."""
    kernel, params = T.meta_var(warp.kernel), T.meta_var(warp.kernel.params)
    threads = T.meta_var(params.warps * WARP_LANES)
    for i in T.serial(-(-kernel.block_rows // threads)):
        index = T.meta_var(i * threads + warp.thread)
        number = T.meta_var(index // params.rows)
        tile = T.meta_var((number // kernel.warp_groups * kernel.grid + warp.block) * kernel.warp_groups + number % kernel.warp_groups)
        row = T.meta_var(tile * params.rows + index % params.rows)
        if T.And(index < kernel.block_rows, row < kernel.n):
            total: T.float32 = 0.0
            for part in T.unroll(params.warps_k):
                total = total + warp.smem.partials[index * params.warps_k + part]
            warp.args.y[row] = T.cast(total, "float16")


@T.inline
def _compute_tiles(warp, x, fetched):
    """Compute a warp's tiles: wait for a k-tile, fetch the one `stages - 1` further into the freed stage, multiply, store."""
    kernel, params = T.meta_var(warp.kernel), T.meta_var(warp.kernel.params)
    accum = T.alloc_local((params.rows,), "float32")
    tile: T.int32 = warp.first_tile
    iteration: T.int32 = 0
    slot: T.int32 = 0
    while tile < kernel.tiles:
        for r in T.unroll(params.rows):
            accum[r] = T.float32(0)
        for k_tile in T.serial(kernel.warp_k_tiles):
            T.ptx.cp.async_.wait_group(params.stages - 2)
            T.cuda.warp_sync()
            # Into the stage that every lane has finished reading.
            freed = T.meta_var(T.Select(slot == 0, params.stages - 1, slot - 1))
            _fetch(warp, fetched[0], fetched[1] * params.warps_k + warp.first_k_tile, warp.first_stage + freed)
            _advance(kernel, fetched[0], fetched[1])
            _multiply(warp, accum, x, k_tile * params.warps_k + warp.first_k_tile, warp.first_stage + slot)
            slot = T.Select(slot == params.stages - 1, 0, slot + 1)
        _store_rows(warp, accum, tile, iteration)
        tile = tile + kernel.tile_stride
        iteration = iteration + 1
    T.ptx.cp.async_.wait_group(0)


def build(kernel: Kernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, a function of weights, scales, x and y."""
    shapes = (kernel.n, kernel.k // 2), (kernel.n, kernel.k // kernel.group), (kernel.k,), (kernel.n,)
    dtypes = "uint8", "float16", "float16", "float16"
    args = _Args(
        *(tirx.decl_buffer(shape, dtype, name) for shape, dtype, name in zip(shapes, dtypes, ("W", "scale", "x", "y"), strict=True))
    )
    params, permute = kernel.params, permute_registers_source()
    ring = params.warps * params.stages

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": params.blocks})
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.grid])
        warp_id = T.warp_id([params.warps])
        lane = T.lane_id([WARP_LANES])
        pool = T.SMEMPool()  # names of its buffers stand in the generated code
        weights = pool.alloc((ring, params.rows, I4_STEP_BYTES), "uint8", align=16)
        scales = pool.alloc((ring, params.rows, kernel.scales), "float16", align=16)
        operands = pool.alloc((kernel.smem_k_tiles * I4_STEP,), "float16", align=16)
        starts = pool.alloc((kernel.smem_k_tiles * QUADS,), "float32", align=16)
        parts = pool.alloc((max(1, kernel.block_rows * params.warps_k),), "float32", align=16)
        pool.commit()
        smem = T.meta_var(_Smem(weights=weights, scales=scales, x=operands, biases=starts, partials=parts))
        warp = T.meta_var(_Warp(kernel=kernel, args=args, smem=smem, block=block, warp=warp_id, lane=lane))
        if kernel.pdl:
            _wait_for_preceding_kernel(warp)
        # x is loaded before the weights, or it would arrive after them.
        x = T.alloc_local((X_VECTORS * 4,), "uint32")
        if kernel.keeps_x_in_registers:
            _load_x_of_lane(warp, x)
        else:
            _load_x(warp, x, 0)
        fetched_tile: T.int32 = warp.first_tile
        fetched_k_tile: T.int32 = 0
        for s in T.unroll(params.stages - 1):
            _fetch(warp, fetched_tile, fetched_k_tile * params.warps_k + warp.first_k_tile, warp.first_stage + s)
            _advance(kernel, fetched_tile, fetched_k_tile)
        bias: T.float32 = 0.0
        if kernel.keeps_x_in_registers:
            bias = T.cuda.func_call(permute[0], x.ptr_to([0]), source_code=permute[1], return_type="float32")
        else:
            _share_x(warp, x)
        _compute_tiles(warp, (x, bias), (fetched_tile, fetched_k_tile))
        if params.warps_k > 1:
            T.cuda.cta_sync()
            _reduce_partials(warp)

    func = tirx.PrimFunc(list(args), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
