"""Owns the mainloop of float8 with scales of blocks: a k-tile, with one scale for a row of A and one for a block of B, is multiplied
by itself and added to float32 sums, scaled.

Knows nothing of how operands come to shared memory or of what becomes of the sums. One consumer scales while another one multiplies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.hopper_limits import MMA_TILE_ROWS
from kerneldecl.compiler.matmul_grouped import SCALE_BLOCK
from kerneldecl.templates.hopper.consumer import fence, issue_mma, release
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.grouped_config import GroupedKernel


class Scales(NamedTuple):
    """Scales in global memory, and a thread's registers for them and for the products of a k-tile."""

    a: Any
    b: Any
    factors: Any
    """One for each row of results that a thread has."""
    products: Any

    @classmethod
    def of(cls, kernel: GroupedKernel) -> Scales:
        buffers, gemm = kernel.buffers, kernel.gemm
        factors = T.alloc_local((2 * gemm.params.mma_tiles,), "float32")
        return cls(buffers["A_scale"], buffers["B_scale"], factors, T.alloc_local((gemm.accum.registers,), "float32"))


def a_scale(kernel: GroupedKernel, scales: Scales, row: Any, k_tile: Any) -> Any:
    """Return the scale of a row of A, of the last one where there is none."""
    spec = kernel.spec
    row = T.min(row, spec.places - 1)
    return scales.a[(*((row // spec.rows, row % spec.rows) if spec.is_masked else (row,)), k_tile)]


@T.inline
def run_scaled(kernel, consumer, scales, at):
    """Multiply the k-tiles of a tile; `at` is its group, the consumer's first row, and the first column."""
    gemm, acc, state = T.meta_var((kernel.gemm, consumer.acc, consumer.state))
    group, row, column = meta_vars(at)
    registers, per_mma_tile = meta_vars((gemm.accum.registers, gemm.accum.per_mma_tile))
    block = T.meta_var(T.min(column // SCALE_BLOCK, (kernel.spec.n - 1) // SCALE_BLOCK))
    products = T.meta_var(consumer._replace(acc=scales.products))
    for x in T.unroll(registers):
        acc[x] = T.float32(0)
    for i in T.serial(gemm.k_tiles):
        for r in T.unroll(2 * gemm.params.mma_tiles):
            own = T.meta_var(row + r // 2 * MMA_TILE_ROWS + consumer.warp * 16 + r % 2 * 8 + consumer.lane // 4)
            scales.factors[r] = a_scale(kernel, scales, own, i) * scales.b[group, block, i]
        consumer.barriers.full.wait(state.stage, state.phase)
        T.ptx.wgmma.fence.sync.aligned()
        issue_mma(products, state.stage, range(gemm.params.mma_tiles), tirx.const(True, "bool"))
        T.ptx.wgmma.commit_group.sync.aligned()
        T.ptx.wgmma.wait_group.sync.aligned(0)
        fence(scales.products, 0, registers)
        release(consumer, state.stage)
        for x in T.unroll(registers):
            acc[x] = acc[x] + scales.products[x] * scales.factors[x // per_mma_tile * 2 + x // 2 % 2]
        state.advance()
