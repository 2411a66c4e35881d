"""Owns the kernel of a grouped GEMM on mma.sync: k-tiles by cp.async in a ring, fragments by ldmatrix, results row by row.

Knows nothing of how its parameters are chosen. Thread blocks are persistent; where groups lie they find as the kernel on wgmma does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.matmul_grouped import MMA_K_TILE, MMA_PAD, GroupedSizes, MmaGroupedParams
from kerneldecl.compiler.intrinsics.int4_dot import cp_async_source
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.grouped_scheduler import GroupedScheduler, Tables, fill_tables
from kerneldecl.templates.shared.grouped_tiles import GroupedTiles

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16"
RASTER_GROUP = 16
VECTORS = MMA_K_TILE // MMA_PAD
"""Vectors of 16 bytes in a row of a k-tile."""


@dataclass(frozen=True)
class MmaGroupedKernel(GroupedTiles):
    """One kernel."""

    sizes: GroupedSizes
    params: MmaGroupedParams
    sm_count: int

    @property
    def tile(self) -> tuple[int, int, int]:
        return self.params.block_m, self.params.block_n, RASTER_GROUP

    @property
    def threads(self) -> int:
        return self.params.threads

    @property
    def clusters(self) -> int:
        return self.sm_count * self.params.blocks

    @property
    def k_tiles(self) -> int:
        return -(-self.spec.k // MMA_K_TILE)

    @property
    def mma(self) -> str:
        kind = "bf16" if self.spec.dtype == "bfloat16" else "f16"
        return f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32"

    @property
    def fragments(self) -> tuple[int, int]:
        """Return a warp's fragments of 16 rows, and of 16 columns."""
        rows, columns = self.params.warp_tile
        return rows // 16, columns // 16

    @property
    def b_shape(self) -> tuple[int, int]:
        """Return the rows and the padded columns of B's k-tile in shared memory."""
        rows, columns = (self.params.block_n, MMA_K_TILE) if self.sizes.is_k_last else (MMA_K_TILE, self.params.block_n)
        return rows, columns + MMA_PAD


class Warp(NamedTuple):
    """A warp's view of the kernel, while its script is read."""

    kernel: MmaGroupedKernel
    a: Any
    b: Any
    args: tuple[Any, Any, Any]
    """A, B and C, flat."""
    warp: Any
    lane: Any

    @property
    def thread(self) -> Any:
        return self.warp * 32 + self.lane

    @property
    def first_row(self) -> Any:
        return self.warp % self.kernel.params.warps_m * self.kernel.params.warp_tile[0]

    @property
    def first_column(self) -> Any:
        return self.warp // self.kernel.params.warps_m * self.kernel.params.warp_tile[1]

    def b_place(self, stage: Any, step: Any, fragment: Any) -> list[Any]:
        """Return where a lane's row of a fragment of 16 columns begins: k or columns along it."""
        column, lane = self.first_column + fragment * 16, self.lane
        if self.kernel.sizes.is_k_last:
            return [stage, column + lane // 16 * 8 + lane % 8, step * 16 + lane // 8 % 2 * 8]
        return [stage, step * 16 + lane % 16, column + lane // 16 * 8]


@T.inline
def _fetch(to, source, is_there):
    """Copy 16 bytes by cp.async, or set them to zero."""
    T.cuda.func_call(cp_async_source(16)[0], to, source, T.Select(is_there, 16, 0), source_code=cp_async_source(16)[1])


@T.inline
def _copy(warp, scheduler, stage, k_tile):
    """Start a thread block's copies of a k-tile: zeros for rows, columns and k that are not there."""
    kernel, spec = T.meta_var((warp.kernel, warp.kernel.spec))
    a, b, _ = meta_vars(warp.args)
    if k_tile < kernel.k_tiles:
        for i in T.unroll(kernel.params.block_m * VECTORS // kernel.threads):
            at = T.meta_var(i * kernel.threads + warp.thread)
            row, k = meta_vars((scheduler.row + at // VECTORS, k_tile * MMA_K_TILE + at % VECTORS * MMA_PAD))
            place = T.meta_var(T.min(row, spec.places - 1) * spec.k + T.min(k, spec.k - MMA_PAD))
            _fetch(warp.a.ptr_to([stage, at // VECTORS, at % VECTORS * MMA_PAD]), a.ptr_to([place]), T.And(row < scheduler.end, k < spec.k))
        for i in T.unroll(kernel.params.block_n * VECTORS // kernel.threads):
            at = T.meta_var(i * kernel.threads + warp.thread)
            if kernel.sizes.is_k_last:
                n, k = meta_vars((scheduler.column * kernel.params.block_n + at // VECTORS, k_tile * MMA_K_TILE + at % VECTORS * MMA_PAD))
                place = T.meta_var((scheduler.segment * spec.n + T.min(n, spec.n - 1)) * spec.k + T.min(k, spec.k - MMA_PAD))
                _fetch(warp.b.ptr_to([stage, at // VECTORS, at % VECTORS * MMA_PAD]), b.ptr_to([place]), T.And(n < spec.n, k < spec.k))
            else:
                per_row = T.meta_var(kernel.params.block_n // MMA_PAD)
                n, k = meta_vars((scheduler.column * kernel.params.block_n + at % per_row * MMA_PAD, k_tile * MMA_K_TILE + at // per_row))
                place = T.meta_var((scheduler.segment * spec.k + T.min(k, spec.k - 1)) * spec.n + T.min(n, spec.n - MMA_PAD))
                _fetch(warp.b.ptr_to([stage, at // per_row, at % per_row * MMA_PAD]), b.ptr_to([place]), T.And(n < spec.n, k < spec.k))
    T.ptx.cp.async_.commit_group()


@T.inline
def _multiply(warp, acc, stage):
    """Multiply a k-tile."""
    kernel, lane = T.meta_var((warp.kernel, warp.lane))
    rows, columns = meta_vars(kernel.fragments)
    a = T.alloc_local((4 * rows,), "uint32")
    b = T.alloc_local((4,), "uint32")
    for step in T.unroll(MMA_K_TILE // 16):
        for r in T.unroll(rows):
            T.ptx[LDMATRIX.format("")](
                *[a[r * 4 + x] for x in range(4)],
                warp.a.ptr_to([stage, warp.first_row + r * 16 + lane % 16, step * 16 + lane // 16 * 8]),
            )
        for c in T.unroll(columns):
            T.ptx[LDMATRIX.format("" if kernel.sizes.is_k_last else ".trans")](
                *[b[x] for x in range(4)], warp.b.ptr_to(warp.b_place(stage, step, c))
            )
            for r in T.unroll(rows):
                for half in T.unroll(2):
                    first = T.meta_var(((r * columns + c) * 2 + half) * 4)
                    T.ptx[kernel.mma](
                        *[acc[first + x] for x in range(4)],
                        *[a[r * 4 + x] for x in range(4)],
                        *[b[half * 2 + x] for x in range(2)],
                        *[acc[first + x] for x in range(4)],
                    )


@T.inline
def _store(warp, acc, scheduler):
    """Store the rows of a tile that are the segment's, each thread its own results in pairs."""
    kernel, spec, out = T.meta_var((warp.kernel, warp.kernel.spec, warp.args[2]))
    rows, columns = meta_vars(kernel.fragments)
    for r in T.unroll(rows * 2):
        row = T.meta_var(scheduler.row + warp.first_row + r * 8 + warp.lane // 4)
        if row < scheduler.end:
            for c in T.unroll(columns * 2):
                column = T.meta_var(scheduler.column * kernel.params.block_n + warp.first_column + c * 8 + warp.lane % 4 * 2)
                if column < spec.n:
                    for x in T.vectorized(2):
                        out[row * spec.n + column + x] = T.cast(
                            acc[((r // 2 * columns + c // 2) * 2 + c % 2) * 4 + r % 2 * 2 + x], spec.out_dtype
                        )


@T.inline
def _tile(warp, acc, scheduler):
    """Compute a tile: zeros where its rows belong to no group."""
    kernel, stages = T.meta_var((warp.kernel, warp.kernel.params.stages))
    for x in T.unroll(kernel.params.accumulators):
        acc[x] = T.float32(0)
    if scheduler.segment < kernel.spec.groups:
        for ahead in T.unroll(stages - 1):
            _copy(warp, scheduler, ahead, ahead)
        for i in T.serial(kernel.k_tiles):
            T.ptx.cp.async_.wait_group(stages - 2)
            T.cuda.cta_sync()
            _copy(warp, scheduler, (i + (stages - 1)) % stages, i + (stages - 1))
            _multiply(warp, acc, i % stages)
        # The next tile's first k-tiles take the place of this one's last.
        T.ptx.cp.async_.wait_group(0)
        T.cuda.cta_sync()
    _store(warp, acc, scheduler)


@T.inline
def _run(kernel, args, sizes, ids):
    """Have a thread block take its tiles one after the other."""
    block, warp, lane = meta_vars(ids)
    pool = T.SMEMPool()
    a = pool.alloc((kernel.params.stages, kernel.params.block_m, MMA_K_TILE + MMA_PAD), kernel.spec.dtype, align=128)
    b = pool.alloc((kernel.params.stages, *kernel.b_shape), kernel.spec.dtype, align=128)
    tables = T.meta_var(Tables.of(pool, kernel))
    pool.commit()
    own = T.meta_var(Warp(kernel, a, b, args, warp, lane))
    fill_tables(kernel, tables, sizes, own.thread)
    acc = T.alloc_local((kernel.params.accumulators,), "float32")
    scheduler = GroupedScheduler(kernel, tables, block)
    while scheduler.valid():
        _tile(own, acc, scheduler)
        scheduler.advance()


def build(kernel: MmaGroupedKernel) -> tvm.IRModule:
    """Return a module whose `main` is the grouped GEMM."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in kernel.spec.arguments}
    a, b, sizes, c = buffers.values()
    spec = kernel.spec
    counts = (spec.places * spec.k, spec.groups * spec.n * spec.k, spec.places * spec.n)

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": kernel.params.blocks})
        block = T.cta_id([kernel.clusters])
        warp = T.warp_id([kernel.threads // 32])
        lane = T.lane_id([32])
        flat_a = T.decl_buffer((counts[0],), spec.dtype, data=a.data)
        flat_b = T.decl_buffer((counts[1],), spec.dtype, data=b.data)
        flat_c = T.decl_buffer((counts[2],), spec.out_dtype, data=c.data)
        _run(kernel, (flat_a, flat_b, flat_c), sizes, (block, warp, lane))

    func = tirx.PrimFunc(list(buffers.values()), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
