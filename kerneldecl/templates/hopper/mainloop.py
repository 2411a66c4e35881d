"""Owns the mainloop of a consumer: wgmma over the stages of a tile's k-tiles, each given back to producers when the next one is multiplied.

Where the epilogue takes long, the last k-tiles are multiplied for one MMA tile after the other: the first one's epilogue is computed
while tensor cores are busy with the second.

Knows nothing of how operands come to shared memory or what becomes of accumulators.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import K_TILE_BYTES
from kerneldecl.analysis.tensor_cores import K_BYTES
from kerneldecl.templates.hopper.consumer import fence, issue_mma, release
from kerneldecl.templates.hopper.dequantised_mainloop import run_dequantised
from kerneldecl.templates.hopper.kernel_config import A_FRAGMENT
from kerneldecl.templates.hopper.scaled_mainloop import run_scaled


@T.inline
def _tail(consumer):
    """Multiply the last k-tiles for the first MMA tile, then for the second."""
    kernel, state, full = T.meta_var((consumer.kernel, consumer.state, consumer.barriers.full))
    mma_tiles, tail = T.meta_var((range(kernel.params.mma_tiles), kernel.tail_k_tiles))
    for _ in T.unroll(tail):
        full.wait(state.stage, state.phase)
        T.ptx.wgmma.fence.sync.aligned()
        issue_mma(consumer, state.stage, mma_tiles[:1], tirx.const(False, "bool"))
        state.advance()
    T.ptx.wgmma.commit_group.sync.aligned()
    T.ptx.wgmma.wait_group.sync.aligned(1)
    release(consumer, consumer.stage_before(tail + 1))
    for s in T.unroll(tail):
        issue_mma(consumer, consumer.stage_before(tail - s), mma_tiles[1:], tirx.const(False, "bool"))
    T.ptx.wgmma.commit_group.sync.aligned()


@T.inline
def _load_a(consumer):
    """Load a stage's rows of A to registers."""
    kernel = T.meta_var(consumer.kernel)
    for s in T.unroll(kernel.params.mma_tiles):
        for k in T.unroll(K_TILE_BYTES // K_BYTES):
            for q in T.unroll(A_FRAGMENT):
                consumer.fragments[(s * (K_TILE_BYTES // K_BYTES) + k) * A_FRAGMENT + q] = T.reinterpret(
                    "uint32", consumer.barriers.a[consumer.state.stage, consumer.a_element(s, k, q)]
                )


@T.inline
def _run_from_registers(consumer, k_tiles):
    """Multiply k-tiles whose A comes from registers, one after the other: another consumer multiplies while this one loads."""
    kernel, state, barriers = T.meta_var((consumer.kernel, consumer.state, consumer.barriers))
    mma_tiles = T.meta_var(range(kernel.params.mma_tiles))
    for i in T.serial(k_tiles):
        barriers.full.wait(state.stage, state.phase)
        _load_a(consumer)
        T.ptx.wgmma.fence.sync.aligned()
        issue_mma(consumer, state.stage, mma_tiles, i == 0)
        T.ptx.wgmma.commit_group.sync.aligned()
        if kernel.params.is_staggered:
            if (consumer.index == 0) & (i == kernel.params.stagger_k_tiles) & (consumer.lane == 0):
                barriers.order.arrive(1)
        T.ptx.wgmma.wait_group.sync.aligned(0)
        release(consumer, state.stage)
        state.advance()


@T.inline
def _run_from_smem(consumer, k_tiles):
    kernel, state, barriers = T.meta_var((consumer.kernel, consumer.state, consumer.barriers))
    mma_tiles, tail = T.meta_var((range(kernel.params.mma_tiles), kernel.tail_k_tiles))
    for i in T.serial(k_tiles - tail):
        barriers.full.wait(state.stage, state.phase)
        T.ptx.wgmma.fence.sync.aligned()
        issue_mma(consumer, state.stage, mma_tiles, i == 0)
        T.ptx.wgmma.commit_group.sync.aligned()
        if kernel.params.is_staggered:
            if (consumer.index == 0) & (i == kernel.params.stagger_k_tiles) & (consumer.lane == 0):
                barriers.order.arrive(1)
        if i > 0:
            T.ptx.wgmma.wait_group.sync.aligned(1)
            release(consumer, consumer.stage_before(1))
        state.advance()
    if tail > 0:
        _tail(consumer)


@T.inline
def run_mainloop(consumer, k_tiles, start):
    """Multiply so many k-tiles of a tile; the last MMAs may still be under way then, and the last stages not given back.

    `start` is the tile's first row, column and k-tile.
    """
    kernel, barriers = T.meta_var((consumer.kernel, consumer.barriers))
    if kernel.k_tile_scales is not None:
        run_scaled(consumer, k_tiles, start)
    elif kernel.is_quantised:
        run_dequantised(consumer, k_tiles)
    elif kernel.a.in_registers:
        _run_from_registers(consumer, k_tiles)
    else:
        _run_from_smem(consumer, k_tiles)
    if kernel.params.is_pingpong:
        if consumer.lane == 0:
            barriers.order.arrive(1 - consumer.index)


@T.inline
def finish_first_mma_tile(consumer):
    """Wait for the accumulators of the first of two MMA tiles."""
    T.ptx.wgmma.wait_group.sync.aligned(1)
    fence(consumer.acc, 0, consumer.kernel.accum.registers // 2)


@T.inline
def finish_mainloop(consumer):
    """Wait for a tile's accumulators, or for those of its second MMA tile, and give the last stages back."""
    kernel = T.meta_var(consumer.kernel)
    k_tiles = T.meta_var(max(1, kernel.tail_k_tiles))
    if (kernel.is_quantised or not kernel.a.in_registers) and kernel.k_tile_scales is None:
        T.ptx.wgmma.wait_group.sync.aligned(0)
        for s in T.unroll(k_tiles):
            release(consumer, consumer.stage_before(k_tiles - s))
    fence(consumer.acc, kernel.accum.registers // 2 if kernel.tail_k_tiles > 0 else 0, kernel.accum.registers)
