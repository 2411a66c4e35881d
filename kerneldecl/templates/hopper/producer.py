"""Owns the producer warpgroup of a GEMM kernel: TMA or threads fill stages with k-tiles, the first of which it prefetches to L2.

Knows nothing of consumers but that they give stages back.
"""

from __future__ import annotations

from tvm.backend.cuda.lang.pipeline import PipelineState
from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.gather import load_through_registers
from kerneldecl.templates.hopper.tile_scheduler import TileScheduler
from kerneldecl.templates.hopper.tma import load_tile, prefetch_tile


@T.inline
def prefetch_k_tiles(cta, scheduler):
    """Have one thread prefetch the first k-tiles of a CTA's tile to L2.

    A prefetch is no access: it changes nothing, and what the preceding kernel still writes goes through the same cache.
    """
    a, b = meta_vars(cta.loaders())
    row, column = meta_vars(cta.tile_origin(scheduler))
    for i in T.serial(cta.kernel.prefetched_k_tiles):
        at = T.meta_var((scheduler.batch, cta.rank.split * cta.kernel.k_tiles_per_cta + i))
        if cta.kernel.early_k_tiles == 0:
            prefetch_tile(a, row, at)
        prefetch_tile(b, column, at)


@T.inline
def _load_by_tma(cta, scheduler):
    """Have one thread fill stages with tiles of both operands, each CTA its boxes of what CTAs of its cluster share."""
    kernel, full, empty = T.meta_var((cta.kernel, cta.smem.full, cta.smem.empty))
    state = PipelineState(kernel.params.stages, 1)
    a, b = meta_vars(cta.loaders())
    scales, zeros, column_scales = meta_vars(cta.factor_loaders())
    while scheduler.valid():
        row, column, begin = meta_vars(cta.tile_start(scheduler))
        for i in T.serial(scheduler.k_tile_count()):
            empty.wait(state.stage, state.phase)
            full.arrive(state.stage, cta.loaded_bytes(row, column))
            at = T.meta_var((scheduler.batch, begin + i))
            barrier = T.meta_var(full.ptr_to([state.stage]))
            load_tile(a, row, at, state.stage, barrier)
            load_tile(b, column, at, state.stage, barrier)
            if kernel.scales is not None:
                load_tile(scales, row, at, state.stage, barrier)
            if kernel.zeros is not None:
                load_tile(zeros, row, at, state.stage, barrier)
            if kernel.column_scales is not None:
                load_tile(column_scales, column, at, state.stage, barrier)
            state.advance()
        scheduler.advance()


@T.inline
def _load_other_by_tma(cta, origin, at, stage):
    """Have one thread load the operand that does not come through registers, if there is one."""
    kernel, full = T.meta_var((cta.kernel, cta.smem.full))
    a, b = meta_vars(cta.loaders())
    row, column = meta_vars(origin)
    full.arrive(stage, cta.loaded_bytes(row, column))
    barrier = T.meta_var(full.ptr_to([stage]))
    if not kernel.a.via_registers:
        load_tile(a, row, at, stage, barrier)
    if not kernel.b.via_registers:
        load_tile(b, column, at, stage, barrier)


@T.inline
def _load_by_both(cta, scheduler):
    """Have a warpgroup fill stages where operands come through registers: all threads load them, the first one has TMA load the other."""
    kernel, full, empty = T.meta_var((cta.kernel, cta.smem.full, cta.smem.empty))
    memory = T.meta_var(kernel.flat_memory())
    state = PipelineState(kernel.params.stages, 1)
    block_k = T.meta_var(kernel.a.row_elements)
    while scheduler.valid():
        row, column, begin = meta_vars(cta.tile_start(scheduler))
        for i in T.serial(scheduler.k_tile_count()):
            empty.wait(state.stage, state.phase)
            if kernel.tma_bytes > 0:
                if cta.thread == 0:
                    _load_other_by_tma(cta, (row, column), (scheduler.batch, begin + i), state.stage)
            if kernel.a.via_registers:
                a_first = T.meta_var((scheduler.batch, row, (begin + i) * block_k))
                load_through_registers(kernel.a, memory[0], cta.smem.a, state.stage, a_first, cta.thread)
            if kernel.b.via_registers:
                b_first = T.meta_var((scheduler.batch, column, (begin + i) * block_k))
                load_through_registers(kernel.b, memory[1], cta.smem.b, state.stage, b_first, cta.thread)
            T.ptx.fence.proxy.async_.shared__cta()
            full.arrive(state.stage)
            state.advance()
        scheduler.advance()


@T.inline
def produce(cta):
    """Have the producer warpgroup fill stages, tile after tile."""
    kernel = T.meta_var(cta.kernel)
    registers, _ = meta_vars(kernel.maxnreg)
    if registers > 0:
        T.ptx.setmaxnreg.dec.sync.aligned.u32(registers)
    if kernel.via_registers:
        loaded = TileScheduler(kernel, cta.first, kernel.clusters)
        _load_by_both(cta, loaded)
    elif cta.lanes[0] == 0:
        if T.cuda.elect_sync():
            scheduler = TileScheduler(kernel, cta.first, kernel.clusters)
            _load_by_tma(cta, scheduler)
        T.cuda.warp_sync()
