"""Owns how a consumer of a wgmma kernel adds up the products of a tile, and gives stages back.

Knows nothing of loading, of tiles' order or of what becomes of sums.

Where results take long to be computed, the last steps of a tile are multiplied for the first of two slabs, then for the second: the results
of the first one are computed while the tensor cores are busy with the second.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.templates.hopper.epilogue import each
from kerneldecl.templates.hopper.kernel_config import Kernel
from kerneldecl.templates.hopper.operands import ROW_BYTES

FENCE_SOURCE = """
__device__ __forceinline__ void tvm_wgmma_fence_operand(float& x) { asm volatile("" : "+f"(x) :: "memory"); }
__device__ __forceinline__ void tvm_wgmma_fence_operand(uint32_t& x) { asm volatile("" : "+r"(x) :: "memory"); }
"""
"""Keeps nvcc from reading sums before wgmma has written them."""


def _before(kernel: Kernel, stage: Any, steps: int) -> Any:
    """Return the stage so many steps before another."""
    return T.Select(stage >= steps, stage - steps, stage + (kernel.tiles.stages - steps))


@T.inline
def _release(kernel, empty, stage, lane, place):
    """Have a warp tell all blocks that write to this one's stages that it has read one."""
    tiles = T.meta_var(kernel.tiles)
    rank_m, rank_n, _ = each(place)
    count = T.meta_var(tiles.cluster_m * tiles.cluster_n)
    if count == 1:
        if lane == 0:
            empty.arrive(stage)
    elif count == 2:
        if lane < 2:
            empty.arrive(stage, remote=lane)
    elif (lane < count) & ((lane % tiles.cluster_m == rank_m) | (lane // tiles.cluster_m == rank_n)):
        empty.arrive(stage, remote=lane)


@T.inline
def _multiply(kernel, acc, descriptors, stage, slab, own, is_first):
    """Start the multiplications of a stage for some of a consumer's slabs, the first of which is the block's `slab`."""
    rows, columns = each(descriptors)
    tiles = T.meta_var(kernel.tiles)
    parts = T.meta_var(tiles.parts_n(kernel.dtype))
    count = T.meta_var(tiles.block_n // parts // 2 // kernel.packing)
    for k in T.unroll(ROW_BYTES // 32):
        for number in T.unroll(len(own)):
            s = T.meta_var(own[0] + number)
            for part in T.unroll(parts):
                T.ptx[kernel.mma](
                    *[acc[(s * parts + part) * count + i] for i in range(count)],
                    rows
                    + T.cast(
                        stage * (kernel.rows.stage_bytes // 16) + (slab + s) * kernel.rows.slab_offset + k * kernel.rows.step_offset,
                        "uint64",
                    ),
                    columns
                    + T.cast(
                        stage * (kernel.columns.stage_bytes // 16)
                        + kernel.columns.row_offset(kernel.mma_n) * part
                        + k * kernel.columns.step_offset,
                        "uint64",
                    ),
                    T.Or(T.Not(is_first), k > 0),
                    *kernel.mma_flags,
                )


@T.inline
def _fence(acc, begin, end):
    """Keep sums from being read earlier than here."""
    for i in T.unroll(end - begin):
        T.cuda.func_call("tvm_wgmma_fence_operand", acc[begin + i], source_code=FENCE_SOURCE)


@T.inline
def start_sums(kernel, acc, descriptors, state, barriers, worker, lane, place, count):
    """Start to add up the products of so many steps of a tile; a stage is given back while the next one is multiplied."""
    full, empty, order = each(barriers)
    slab = T.meta_var(0 if kernel.tiles.is_pingpong else worker * kernel.tiles.mma_tiles)
    mma_tiles, late = T.meta_var(range(kernel.tiles.mma_tiles)), T.meta_var(kernel.late_steps)
    for i in T.serial(count - late):
        full.wait(state.stage, state.phase)
        T.ptx.wgmma.fence.sync.aligned()
        _multiply(kernel, acc, descriptors, state.stage, slab, mma_tiles, i == 0)
        T.ptx.wgmma.commit_group.sync.aligned()
        if kernel.tiles.is_staggered:
            if (worker == 0) & (i == kernel.tiles.lag) & (lane == 0):
                order.arrive(1)
        if i > 0:
            T.ptx.wgmma.wait_group.sync.aligned(1)
            _release(kernel, empty, _before(kernel, state.stage, 1), lane, place)
        state.advance()
    if late > 0:
        for _ in T.unroll(late):
            full.wait(state.stage, state.phase)
            T.ptx.wgmma.fence.sync.aligned()
            _multiply(kernel, acc, descriptors, state.stage, slab, mma_tiles[:1], tirx.const(False, "bool"))
            state.advance()
        T.ptx.wgmma.commit_group.sync.aligned()
        T.ptx.wgmma.wait_group.sync.aligned(1)
        _release(kernel, empty, _before(kernel, state.stage, late + 1), lane, place)
        for s in T.unroll(late):
            _multiply(kernel, acc, descriptors, _before(kernel, state.stage, late - s), slab, mma_tiles[1:], tirx.const(False, "bool"))
        T.ptx.wgmma.commit_group.sync.aligned()
    if kernel.tiles.is_pingpong:
        if lane == 0:
            order.arrive(1 - worker)


@T.inline
def end_first_slab(kernel, acc):
    """Wait for the sums of the first of two slabs."""
    T.ptx.wgmma.wait_group.sync.aligned(1)
    _fence(acc, 0, kernel.registers // 2)


@T.inline
def end_sums(kernel, acc, state, empty, lane, place):
    """Wait for a tile's sums, or for those of its second slab, and give the last stages back."""
    late = T.meta_var(max(1, kernel.late_steps))
    T.ptx.wgmma.wait_group.sync.aligned(0)
    for s in T.unroll(late):
        _release(kernel, empty, _before(kernel, state.stage, late - s), lane, place)
    _fence(acc, kernel.registers // 2 if kernel.late_steps > 0 else 0, kernel.registers)
