"""Owns the TIRx kernel of convolutions that read A fragments out of an image in shared memory: lanes load them, weights are wgmma's B.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.backend.cuda.lang.pipeline import PipelineState, TMABar
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS, SMEM_BOX_ALIGN_BYTES, WARPGROUP_THREADS
from kerneldecl.templates.hopper.consumer import FENCE_SOURCE
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.smem_conv_config import ITEM_BYTES, MMA_K, MMA_K_PAIRS, PIECE, SmemConvKernel
from kerneldecl.templates.hopper.store import StoreContext, store_tile, wait_for_stores
from kerneldecl.templates.hopper.tma import ENCODE, LOAD


class ImageStages(NamedTuple):
    """The parts of the image that tiles need, in shared memory, while a kernel's script is read."""

    kernel: SmemConvKernel
    map: Any
    image: Any
    full: Any


@T.inline
def _load_image(stages, stage, tile):
    """Have one thread start the load of a tile's part of the image."""
    stages.full.arrive(stage, stages.kernel.copied_bytes)
    T.ptx[LOAD.format(3, "")](
        stages.image.ptr_to([stage, 0]), T.address_of(stages.map), *stages.kernel.corner(tile), stages.full.ptr_to([stage])
    )


@T.inline
def _keep_weights(kernel, weights, source, column, thread):
    """Have a CTA copy the weights of its filters, as wgmma needs them; zeros where there are none."""
    convolution = T.meta_var(kernel.convolution)
    _, channel_stride, column_stride, row_stride = meta_vars(convolution.weight_strides)
    rows = T.meta_var(kernel.k_tiles * MMA_K)
    line = T.meta_var(2 * kernel.line_pairs)
    for turn in T.unroll(-(-kernel.pieces // WARPGROUP_THREADS)):
        piece = T.meta_var(turn * WARPGROUP_THREADS + thread)
        mma_tile = T.meta_var(piece // (rows * (MMA_TILE_ROWS // PIECE)))
        row = T.meta_var(piece // (MMA_TILE_ROWS // PIECE) % rows)
        part = T.meta_var(piece % (MMA_TILE_ROWS // PIECE))
        at = T.meta_var(row % line)
        tap = T.meta_var((at - kernel.lead) // convolution.channels)
        channel = T.meta_var((at - kernel.lead) % convolution.channels)
        first = T.meta_var(column * kernel.params.block_n + mma_tile * MMA_TILE_ROWS + part * PIECE)
        place = T.meta_var(T.bitwise_xor(part, row % 8) * PIECE)
        if kernel.pieces % WARPGROUP_THREADS == 0 or piece < kernel.pieces:
            is_term = T.meta_var(T.And(row < convolution.rows.taps * line, T.And(at >= kernel.lead, at < kernel.lead + kernel.line)))
            if T.And(is_term, first < convolution.filters):
                start = T.meta_var(row // line * row_stride + tap * column_stride + channel * channel_stride + first)
                for v in T.vectorized(PIECE):
                    weights[mma_tile, row, place + v] = source[start + v]
            else:
                for v in T.vectorized(PIECE):
                    weights[mma_tile, row, place + v] = T.cast(0, kernel.dtype)


class MmaTile(NamedTuple):
    """A warpgroup's MMA tile: its accumulators, and what they are multiplied from, while a kernel's script is read."""

    stages: ImageStages
    acc: Any
    fragments: Any
    descriptor: Any
    """wgmma's descriptor of the weights."""
    lanes: tuple[Any, Any]
    """Warp, lane."""

    @property
    def kernel(self) -> SmemConvKernel:
        return self.stages.kernel


def _load_fragments(tile: MmaTile, stage: Any, mma_tile: Any, k_tiles: range) -> None:
    """Have a lane load its elements of an MMA tile's windows, for some k-tiles."""
    for at, k_tile in enumerate(k_tiles):
        for q in range(4):
            pair = tile.kernel.pair(tile.stages.image, (stage, mma_tile), q % 2, k_tile * MMA_K_PAIRS + q // 2 * 4, tile.lanes)
            T.buffer_store(tile.fragments, pair, [at * 4 + q])


@T.inline
def _fence(registers, count):
    """Keep nvcc from moving accesses to registers across here."""
    for i in T.unroll(count):
        T.cuda.func_call("tvm_wgmma_fence_operand", registers[i], source_code=FENCE_SOURCE)


@T.inline
def _multiply_some(tile, stage, mma_tile, k_tiles):
    """Multiply some k-tiles, as many at once as a thread has registers for."""
    kernel = T.meta_var(tile.kernel)
    _load_fragments(tile, stage, mma_tile, k_tiles)
    _fence(tile.fragments, len(k_tiles) * 4)
    T.ptx.wgmma.fence.sync.aligned()
    for at in T.unroll(len(k_tiles)):
        T.ptx[kernel.mma](
            *[tile.acc[i] for i in range(kernel.accum.count)],
            *[tile.fragments[at * 4 + q] for q in range(4)],
            tile.descriptor + T.cast((k_tiles[0] + at) * (MMA_K * MMA_TILE_ROWS * ITEM_BYTES // 16), "uint64"),
            T.Not(k_tiles[0] + at == 0),
            1,
            1,
            1,
        )
    T.ptx.wgmma.commit_group.sync.aligned()
    T.ptx.wgmma.wait_group.sync.aligned(0)


def _multiply(tile: MmaTile, stage: Any, mma_tile: Any) -> None:
    """Multiply all k-tiles."""
    kernel = tile.kernel
    for first in range(0, kernel.k_tiles, kernel.held_k_tiles):
        _multiply_some(tile, stage, mma_tile, range(first, min(first + kernel.held_k_tiles, kernel.k_tiles)))
    _fence(tile.acc, kernel.accum.count)


@T.inline
def _process_tiles(context, tile, first, column):
    """Have a CTA multiply one tile after the other and store the results, the parts of the image for the next ones under way."""
    kernel, stages, thread = T.meta_var((tile.kernel, tile.stages, tile.lanes[0] * 32 + tile.lanes[1]))
    ahead = T.meta_var(kernel.params.stages - 1)
    state = PipelineState(kernel.params.stages, 0)
    while first < kernel.boxes.count:
        # All have left the stage that the tile before this one took.
        T.cuda.cta_sync()
        if thread == 0:
            next_tile = T.meta_var(first + ahead * kernel.rows)
            if next_tile < kernel.boxes.count:
                _load_image(stages, (state.stage + ahead) % kernel.params.stages, next_tile)
        stages.full.wait(state.stage, state.phase)
        for mma_tile in T.unroll(kernel.params.mma_tiles):
            _multiply(tile, state.stage, mma_tile)
            row = T.meta_var(first * kernel.boxes.pixels + mma_tile * MMA_TILE_ROWS)
            store_tile(context, (0, row, column * kernel.params.block_n, 0))
        state.advance()
        first = first + kernel.rows
    wait_for_stores(context.plan, thread == 0)


@T.meta_class
class Smem:
    """Shared memory of a CTA, and the barriers of its stages."""

    def __init__(self, kernel: SmemConvKernel, pool: Any) -> None:
        params, plan = kernel.params, kernel.epilogue_plan
        self.weights = pool.alloc((kernel.weight_tiles, kernel.k_tiles * MMA_K, MMA_TILE_ROWS), kernel.dtype, align=1024)
        self.image = pool.alloc((params.stages, kernel.stage_words), "uint32", align=SMEM_BOX_ALIGN_BYTES)
        self.staging = pool.alloc((1, *plan.staging_shape), plan.epilogue.dtype, align=1024) if plan.buffers > 0 else None
        self.full = TMABar(pool, params.stages)


@T.inline
def _run(kernel, smem, maps, block, lanes):
    """Have a CTA, which shares the pixels' tiles of one tile of filters with others, keep its weights and take tile after tile."""
    plan, thread = T.meta_var((kernel.epilogue_plan, lanes[0] * 32 + lanes[1]))
    stages = T.meta_var(ImageStages(kernel, maps[0], smem.image, smem.full))
    column = T.meta_var(block % kernel.columns)
    tile: T.int32 = block // kernel.columns
    if thread == 0:
        for s in T.unroll(kernel.params.stages - 1):
            if tile + s * kernel.rows < kernel.boxes.count:
                _load_image(stages, s, tile + s * kernel.rows)
    source = T.meta_var(kernel.flat_weights())
    _keep_weights(kernel, smem.weights, source, column, thread)
    T.ptx.fence.proxy.async_.shared__cta()
    acc = T.alloc_local((kernel.accum.registers,), kernel.accum.register_dtype)
    fragments = T.alloc_local((kernel.held_k_tiles * 4,), "uint32")
    aux = T.meta_var(plan.aux_registers())
    packed = T.alloc_local((4,), "uint32")
    descriptor = T.uint64(0)
    T.cuda.wgmma.encode_matrix_descriptor(T.address_of(descriptor), smem.weights.ptr_to([0, 0, 0]), *kernel.descriptor)
    context = T.meta_var(StoreContext(plan=plan, acc=acc, aux=aux, packed=packed, staging=smem.staging, map=maps[1], lanes=lanes))
    mma_tile = T.meta_var(MmaTile(stages=stages, acc=acc, fragments=fragments, descriptor=descriptor, lanes=lanes))
    _process_tiles(context, mma_tile, tile, column)


def build(kernel: SmemConvKernel) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, on the convolution's parameters."""
    convolution, params, epilogue = kernel.convolution, kernel.params, kernel.epilogue

    # The names of tensor maps are arguments on the host, and so part of the digest under which measurements are kept.
    @T.prim_func(check_well_formed=False)
    def main():
        image_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(ENCODE, image_map, kernel.dtype, *kernel.map.args)
        store_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        if kernel.epilogue_plan.stores_by_tma:
            T.call_packed(ENCODE, store_map, epilogue.dtype, *epilogue.map.args)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": params.blocks})
        T.attr({"tirx.use_programtic_dependent_launch": True})
        block = T.cta_id([kernel.rows * kernel.columns])
        warp = T.warp_id([4])
        lane = T.lane_id([32])
        pool = T.SMEMPool()
        smem = Smem(kernel, pool)
        pool.commit()
        smem.full.init(1)
        T.ptx.fence.mbarrier_init.release.cluster()
        T.cuda.cta_sync()
        # The next kernel may start as soon as there is room: it waits in turn until this one has ended.
        T.ptx.griddepcontrol.launch_dependents()
        T.ptx.griddepcontrol.wait()
        _run(kernel, smem, (image_map, store_map), block, (warp, lane))

    func = tirx.PrimFunc(list(convolution.func_params), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
