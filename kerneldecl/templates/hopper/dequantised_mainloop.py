"""Owns the mainloop of a consumer that dequantises operand A: registers of one part of k are written while wgmma reads those of another.

Knows nothing of how operands come to shared memory or what becomes of accumulators.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import K_TILE_BYTES, MMA_TILE_ROWS
from kerneldecl.analysis.packed_weights import LANE_WORDS, TILE_ROWS, TILE_WORDS
from kerneldecl.analysis.tensor_cores import K_BYTES
from kerneldecl.compiler.intrinsics import float4_fragments, int4_fragments
from kerneldecl.templates.hopper.consumer import issue_mma, release
from kerneldecl.templates.hopper.kernel_config import A_FRAGMENT


def _source_of(kernel, scales):
    """Return the name and CUDA of the function that dequantises a part of A, which has so many scales for a row."""
    block_m = kernel.params.block_m
    if kernel.float4_scales:
        return float4_fragments.dequantise_source(kernel.dtype, kernel.float4_scales, scales, block_m)
    return int4_fragments.dequantise_source(kernel.dtype, scales, block_m, has_zeros=kernel.zeros is not None)


@T.inline
def _dequantise(consumer):
    """Dequantise a part of a stage's rows of A to registers."""
    kernel, stage, barriers = T.meta_var((consumer.kernel, consumer.state.stage, consumer.barriers))
    block_m = T.meta_var(kernel.params.block_m)
    # Rows have a scale for all parts, one for each, or several.
    scales = T.meta_var(kernel.scales.stage_rows // block_m)
    first_scale = T.meta_var(consumer.part * scales // kernel.k_parts * block_m)
    name, source = T.meta_var(_source_of(kernel, max(1, scales // kernel.k_parts)))
    for s in T.unroll(kernel.params.mma_tiles):
        row = T.meta_var((consumer.first_mma_tile + s) * MMA_TILE_ROWS + consumer.warp * TILE_ROWS)
        tile = T.meta_var(consumer.part * (block_m // TILE_ROWS) + row // TILE_ROWS)
        registers = T.meta_var(consumer.fragments.ptr_to([consumer.first_fragment + s * (K_TILE_BYTES // K_BYTES) * A_FRAGMENT]))
        values = T.meta_var(barriers.a.ptr_to([stage, tile * TILE_WORDS + consumer.lane * LANE_WORDS]))
        scale = T.meta_var(barriers.scales.ptr_to([stage, first_scale + row + consumer.lane // 4]))
        if kernel.zeros is None:
            T.cuda.func_call(name, registers, values, scale, source_code=source)
        else:
            zero = T.meta_var(barriers.zeros.ptr_to([stage, first_scale + row + consumer.lane // 4]))
            T.cuda.func_call(name, registers, values, scale, zero, source_code=source)


@T.inline
def _multiply_dequantised(consumer, is_first):
    """Dequantise a part of a k-tile while the one before is multiplied, start its MMAs, and wait for those of the one before."""
    _dequantise(consumer)
    T.ptx.wgmma.fence.sync.aligned()
    issue_mma(consumer, consumer.state.stage, range(consumer.kernel.params.mma_tiles), is_first)
    T.ptx.wgmma.commit_group.sync.aligned()
    T.ptx.wgmma.wait_group.sync.aligned(1)


@T.inline
def _start_k_tile(consumer, is_first):
    """Wait for a k-tile, multiply its first part, and give the stage before back."""
    state = T.meta_var(consumer.state)
    consumer.barriers.full.wait(state.stage, state.phase)
    _multiply_dequantised(consumer, is_first)
    if T.Not(is_first):
        release(consumer, consumer.stage_before(1))


@T.inline
def run_dequantised(consumer, k_tiles):
    """Multiply k-tiles whose A is dequantised, in turns from two sets of registers: MMAs read one while the other is written."""
    no = T.meta_var(tirx.const(False, "bool"))
    second = T.meta_var(consumer._replace(first_fragment=consumer.kernel.a_fragments // 2))
    if consumer.kernel.k_parts == 2:
        for i in T.serial(k_tiles):
            _start_k_tile(consumer, i == 0)
            _multiply_dequantised(second._replace(part=1), no)
            consumer.state.advance()
    else:
        if k_tiles % 2 == 1:
            # First, so that pairs begin with the second set under way, as they end: ptxas serialises MMAs behind a last one.
            _start_k_tile(second, tirx.const(True, "bool"))
            consumer.state.advance()
        for pair in T.serial(k_tiles // 2):
            _start_k_tile(consumer, no if k_tiles % 2 == 1 else pair == 0)
            consumer.state.advance()
            _start_k_tile(second, no)
            consumer.state.advance()
