"""Owns the TIRx kernel of convolutions whose windows are read out of shared memory: fragments by lanes, weights by wgmma itself.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import PipelineState, TMABar
from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import each
from kerneldecl.templates.hopper.gemm_kernel import store
from kerneldecl.templates.hopper.mainloop import FENCE_SOURCE
from kerneldecl.templates.hopper.params import SLAB, WARPGROUP
from kerneldecl.templates.hopper.smem_conv_config import ITEM_BYTES, PIECE, STEP, STEP_PAIRS, TMA_ALIGN_BYTES, Kernel
from kerneldecl.templates.hopper.tma import ENCODE, LOAD


def take(kernel: Kernel, image: Any, fragments: Any, stage: Any, slab: Any, steps: range, lanes: tuple[Any, Any]) -> None:
    """Have a lane load its elements of a slab's windows, for some steps of the reduction."""
    for at, step in enumerate(steps):
        for q in range(4):
            T.buffer_store(fragments, kernel.pair(image, stage, slab, q % 2, step * STEP_PAIRS + q // 2 * 4, lanes), [at * 4 + q])


@T.inline
def _fetch(kernel, image_map, image, full, stage, tile):
    """Have one thread start the copies of a tile's part of the image."""
    full.arrive(stage, kernel.copied_bytes)
    T.ptx[LOAD.format(3, "")](image.ptr_to([stage, 0]), T.address_of(image_map), *kernel.corner(tile), full.ptr_to([stage]))


@T.inline
def _keep_weights(kernel, weights, source, column, thread):
    """Have a block copy the weights of its filters, as wgmma wants them; zeros where there are none."""
    convolution = T.meta_var(kernel.convolution)
    _, channel_stride, column_stride, row_stride = each(convolution.weight_strides)
    rows = T.meta_var(kernel.steps * STEP)
    line = T.meta_var(2 * kernel.line_pairs)
    for turn in T.unroll(-(-kernel.pieces // WARPGROUP)):
        piece = T.meta_var(turn * WARPGROUP + thread)
        slab = T.meta_var(piece // (rows * (SLAB // PIECE)))
        row = T.meta_var(piece // (SLAB // PIECE) % rows)
        part = T.meta_var(piece % (SLAB // PIECE))
        at = T.meta_var(row % line)
        tap = T.meta_var((at - kernel.lead) // convolution.channels)
        channel = T.meta_var((at - kernel.lead) % convolution.channels)
        first = T.meta_var(column * kernel.parameters.block_n + slab * SLAB + part * PIECE)
        place = T.meta_var(T.bitwise_xor(part, row % 8) * PIECE)
        if kernel.pieces % WARPGROUP == 0 or piece < kernel.pieces:
            is_term = T.meta_var(T.And(row < convolution.rows.taps * line, T.And(at >= kernel.lead, at < kernel.lead + kernel.line)))
            if T.And(is_term, first < convolution.filters):
                start = T.meta_var(row // line * row_stride + tap * column_stride + channel * channel_stride + first)
                for v in T.vectorized(PIECE):
                    weights[slab, row, place + v] = source[start + v]
            else:
                for v in T.vectorized(PIECE):
                    weights[slab, row, place + v] = T.cast(0, kernel.dtype)


@T.meta_class
class Slab:
    """A slab of results: its sums, and where its windows are."""

    def __init__(self, kernel: Kernel, acc: Any, fragments: Any, image: Any, lanes: tuple[Any, Any]) -> None:
        self.kernel, self.acc, self.fragments, self.image, self.lanes = kernel, acc, fragments, image, lanes

    @T.inline
    def multiply(self, descriptor, stage, slab, first):
        """Add up the products from a step of the reduction on; as many steps at once as a thread has registers for."""
        steps = T.meta_var(range(first, min(first + self.kernel.held, self.kernel.steps)))
        take(self.kernel, self.image, self.fragments, stage, slab, steps, self.lanes)
        for i in T.unroll(len(steps) * 4):
            T.cuda.func_call("tvm_wgmma_fence_operand", self.fragments[i], source_code=FENCE_SOURCE)
        T.ptx.wgmma.fence.sync.aligned()
        for at in T.unroll(len(steps)):
            T.ptx[self.kernel.mma](
                *[self.acc[i] for i in range(self.kernel.parameters.block_n // 2)],
                *[self.fragments[at * 4 + q] for q in range(4)],
                descriptor + T.cast((first + at) * (STEP * SLAB * ITEM_BYTES // 16), "uint64"),
                T.Not(first + at == 0),
                1,
                1,
                1,
            )
        T.ptx.wgmma.commit_group.sync.aligned()
        T.ptx.wgmma.wait_group.sync.aligned(0)
        if first + self.kernel.held < self.kernel.steps:
            self.multiply(descriptor, stage, slab, first + self.kernel.held)
        else:
            for i in T.unroll(self.kernel.parameters.block_n // 2):
                T.cuda.func_call("tvm_wgmma_fence_operand", self.acc[i], source_code=FENCE_SOURCE)


def build(kernel: Kernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the convolution's parameters."""
    convolution, tiles, results = kernel.convolution, kernel.parameters, kernel.results
    maps_store = results.map is not None and kernel.buffers > 0

    @T.prim_func(check_well_formed=False)
    def main():
        image_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, image_map, kernel.dtype, *kernel.map.args)
        store_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if maps_store:
            T.call_packed(ENCODE, store_map, results.dtype, *results.map.args)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": tiles.blocks})
        T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.rows * kernel.columns])
        warp = T.warp_id([4])
        lane = T.lane_id([32])
        pool = T.SMEMPool()
        weights = pool.alloc((kernel.weight_slabs, kernel.steps * STEP, SLAB), kernel.dtype, align=1024)
        image = pool.alloc((tiles.stages, kernel.stage_words), "uint32", align=TMA_ALIGN_BYTES)
        staging_shape = T.meta_var((1, kernel.buffers, results.chunk_elements))
        staging = T.meta_var(pool.alloc(staging_shape, results.dtype, align=1024) if kernel.buffers > 0 else None)
        full = TMABar(pool, tiles.stages)
        pool.commit()
        full.init(1)
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()

        thread = T.meta_var(warp * 32 + lane)
        column = T.meta_var(block % kernel.columns)
        tile: T.int32 = block // kernel.columns
        if thread == 0:
            for s in T.unroll(tiles.stages - 1):
                if tile + s * kernel.rows < kernel.boxes.count:
                    _fetch(kernel, image_map, image, full, s, tile + s * kernel.rows)
        source = T.meta_var(kernel.weights_in_a_row())
        _keep_weights(kernel, weights, source, column, thread)
        T.ptx.fence.proxy.async_.shared__cta()
        acc = T.alloc_local((tiles.block_n // 2,), "float32")
        fragments = T.alloc_local((kernel.held * 4,), "uint32")
        addends = T.meta_var([T.alloc_local((kernel.chunk_sums,), dtype) for dtype in results.addend_dtypes] if kernel.buffers > 0 else [])
        packed = T.alloc_local((4,), "uint32")
        descriptor = T.uint64(0)
        T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptor), weights.ptr_to([0, 0, 0]), *kernel.descriptor)
        state = PipelineState(tiles.stages, 0)
        results_of = T.meta_var(Slab(kernel, acc, fragments, image, (warp, lane)))
        while tile < kernel.boxes.count:
            # All have left the stage that the one before this took.
            T.cuda.cta_sync()
            if thread == 0:
                ahead = T.meta_var(tile + (tiles.stages - 1) * kernel.rows)
                if ahead < kernel.boxes.count:
                    _fetch(kernel, image_map, image, full, (state.stage + (tiles.stages - 1)) % tiles.stages, ahead)
            full.wait(state.stage, state.phase)
            for slab in T.unroll(tiles.mma_tiles):
                results_of.multiply(descriptor, state.stage, slab, 0)
                row = T.meta_var(tile * kernel.boxes.pixels + slab * SLAB)
                store(kernel, acc, addends, packed, staging, store_map, (0, row, column * tiles.block_n, 0), (warp, lane))
            state.advance()
            tile = tile + kernel.rows
        if maps_store:
            if thread == 0:
                T.ptx.cp.async_.bulk.wait_group(0)

    func = tirx.PrimFunc(list(convolution.params), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
