"""Owns the mainloop of a consumer that scales the products of each k-tile before it adds them to accumulators: float8 with block scales.

wgmma multiplies a k-tile into registers of its own, one or two sets of them. While it multiplies the next one into the second set, or other
consumers multiply, these are scaled and added in float32.

Knows nothing of how operands come to shared memory or what becomes of accumulators.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.block_scales import BLOCK
from kerneldecl.templates.hopper.consumer import fence, issue_mma, release


@T.inline
def _load_scales(consumer, scales, set_number, start, i):
    """Load the scales of a k-tile's products: of a thread's two rows, times that of the columns."""
    kernel, smem = T.meta_var((consumer.kernel, consumer.barriers))
    column, begin = T.meta_var(start)
    row = T.meta_var(consumer.first_row + consumer.warp * 16 + consumer.lane // 4)
    blocks, k_tiles = T.meta_var([int(extent) for extent in kernel.column_scales.shape])
    of_column: T.float32 = kernel.column_scales[T.min(column // BLOCK, blocks - 1), T.min(begin + i, k_tiles - 1)]
    for half in T.unroll(2):
        scales[set_number * 2 + half] = smem.scales[consumer.state.stage, row + half * 8] * of_column


@T.inline
def _multiply(consumer, scales, set_number, start, i):
    """Wait for a k-tile and start its MMAs into a set of registers."""
    state = T.meta_var(consumer.state)
    first = T.meta_var(set_number * consumer.kernel.accum.registers)
    consumer.barriers.full.wait(state.stage, state.phase)
    _load_scales(consumer, scales, set_number, start, i)
    T.ptx.wgmma.fence.sync.aligned()
    issue_mma(consumer._replace(first_partial=first), state.stage, range(1), tirx.const(True, "bool"))
    T.ptx.wgmma.commit_group.sync.aligned()
    state.advance()


@T.inline
def _add(consumer, scales, set_number, left):
    """Wait until so many k-tiles are being multiplied, give the stage before them back, and add the set's products, scaled."""
    acc, partials = T.meta_var((consumer.acc, consumer.partials))
    count = T.meta_var(consumer.kernel.accum.registers)
    T.ptx.wgmma.wait_group.sync.aligned(left)
    fence(partials, set_number * count, (set_number + 1) * count)
    release(consumer, consumer.stage_before(left + 1))
    for i in T.unroll(count):
        acc[i] = acc[i] + partials[set_number * count + i] * scales[set_number * 2 + i % 4 // 2]


@T.inline
def run_scaled(consumer, k_tiles, start):
    """Multiply so many k-tiles, scaled, and leave the results in the accumulators; `start` is the tile's first column and k-tile."""
    sets = T.meta_var(consumer.kernel.partial_sets)
    scales = T.alloc_local((2 * sets,), "float32")
    for j in T.unroll(consumer.kernel.accum.registers):
        consumer.acc[j] = T.float32(0)
    for turn in T.serial(k_tiles // sets):
        _multiply(consumer, scales, 0, start, turn * sets)
        if sets == 2:
            _multiply(consumer, scales, 1, start, turn * sets + 1)
            _add(consumer, scales, 0, 1)
            _add(consumer, scales, 1, 0)
        else:
            _add(consumer, scales, 0, 0)
    if k_tiles % sets == 1:
        _multiply(consumer, scales, 0, start, k_tiles - 1)
        _add(consumer, scales, 0, 0)
