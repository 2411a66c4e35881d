"""Owns the kernel of a grouped GEMM on mma.sync: k-tiles by cp.async in a ring, fragments by ldmatrix, results row by row.

Knows nothing of how its parameters are chosen. Thread blocks are persistent; where groups lie they find as the kernel on wgmma does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES
from kerneldecl.analysis.matmul_grouped import MMA_K_TILE, MMA_PAD, SCALE_COLUMNS, GroupedSizes, MmaGroupedParams
from kerneldecl.analysis.tensor_cores import PTX_TYPES
from kerneldecl.compiler.intrinsics.int4_dot import cp_async_source
from kerneldecl.model import dtype_bytes
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.grouped_scheduler import GroupedScheduler, Tables, fill_tables
from kerneldecl.templates.shared.grouped_tiles import GroupedTiles

LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4{}.shared.b16"
RASTER_GROUP = 16
VECTORS = MMA_K_TILE // MMA_PAD
"""Vectors of 16 bytes in a row of a k-tile."""
STEPS = 2
"""Steps of 32 bytes along k that are multiplied, in a k-tile."""


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
        return -(-self.spec.k // self.k_tile)

    @property
    def vector(self) -> int:
        """Return the elements of 16 bytes."""
        return VECTOR_BYTES // dtype_bytes(self.spec.dtype)

    @property
    def k_tile(self) -> int:
        return VECTORS * self.vector

    @property
    def mma(self) -> str:
        kind = PTX_TYPES[self.spec.dtype]
        return f"mma.sync.aligned.m16n8k{2 * self.vector}.row.col.f32.{kind}.{kind}.f32"

    @property
    def fragments(self) -> tuple[int, int]:
        """Return a warp's fragments of 16 rows, and of 16 columns."""
        rows, columns = self.params.warp_tile
        return rows // 16, columns // 16

    @property
    def b_shape(self) -> tuple[int, int]:
        """Return the rows and the padded columns of B's k-tile in shared memory."""
        rows, columns = (self.params.block_n, self.k_tile) if self.sizes.is_k_last else (self.k_tile, self.params.block_n)
        return rows, columns + self.vector


class Args(NamedTuple):
    """Arguments of a kernel."""

    a: Any
    b: Any
    c: Any
    scales: tuple[Any, ...]
    """Those of A and of B, if operands have scales."""


class Warp(NamedTuple):
    """A warp's view of the kernel, while its script is read."""

    kernel: MmaGroupedKernel
    a: Any
    b: Any
    args: Args
    """Arguments, flat."""
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
            vector = self.kernel.vector
            return [stage, column + lane // 16 * 8 + lane % 8, step * (2 * vector) + lane // 8 % 2 * vector]
        return [stage, step * 16 + lane % 16, column + lane // 16 * 8]


@T.inline
def _fetch(to, source, is_there):
    """Copy 16 bytes by cp.async, or set them to zero."""
    T.cuda.func_call(cp_async_source(16)[0], to, source, T.Select(is_there, 16, 0), source_code=cp_async_source(16)[1])


@T.inline
def _copy(warp, scheduler, stage, k_tile):
    """Start a thread block's copies of a k-tile: zeros for rows, columns and k that are not there."""
    kernel, spec = T.meta_var((warp.kernel, warp.kernel.spec))
    a, b = meta_vars((warp.args.a, warp.args.b))
    vector, size = meta_vars((kernel.vector, kernel.k_tile))
    if k_tile < kernel.k_tiles:
        for i in T.unroll(kernel.params.block_m * VECTORS // kernel.threads):
            at = T.meta_var(i * kernel.threads + warp.thread)
            row, k = meta_vars((scheduler.row + at // VECTORS, k_tile * size + at % VECTORS * vector))
            place = T.meta_var(T.min(row, spec.places - 1) * spec.k + T.min(k, spec.k - vector))
            _fetch(warp.a.ptr_to([stage, at // VECTORS, at % VECTORS * vector]), a.ptr_to([place]), T.And(row < scheduler.end, k < spec.k))
        for i in T.unroll(kernel.params.block_n * VECTORS // kernel.threads):
            at = T.meta_var(i * kernel.threads + warp.thread)
            if kernel.sizes.is_k_last:
                n, k = meta_vars((scheduler.column * kernel.params.block_n + at // VECTORS, k_tile * size + at % VECTORS * vector))
                place = T.meta_var((scheduler.segment * spec.n + T.min(n, spec.n - 1)) * spec.k + T.min(k, spec.k - vector))
                _fetch(warp.b.ptr_to([stage, at // VECTORS, at % VECTORS * vector]), b.ptr_to([place]), T.And(n < spec.n, k < spec.k))
            else:
                per_row = T.meta_var(kernel.params.block_n // vector)
                n, k = meta_vars((scheduler.column * kernel.params.block_n + at % per_row * vector, k_tile * size + at // per_row))
                place = T.meta_var((scheduler.segment * spec.k + T.min(k, spec.k - 1)) * spec.n + T.min(n, spec.n - vector))
                _fetch(warp.b.ptr_to([stage, at // per_row, at % per_row * vector]), b.ptr_to([place]), T.And(n < spec.n, k < spec.k))
    T.ptx.cp.async_.commit_group()


@T.inline
def _multiply(warp, acc, stage):
    """Multiply a k-tile."""
    kernel, lane = T.meta_var((warp.kernel, warp.lane))
    rows, columns = meta_vars(kernel.fragments)
    a = T.alloc_local((4 * rows,), "uint32")
    b = T.alloc_local((4,), "uint32")
    vector = T.meta_var(kernel.vector)
    for step in T.unroll(STEPS):
        for r in T.unroll(rows):
            T.ptx[LDMATRIX.format("")](
                *[a[r * 4 + x] for x in range(4)],
                warp.a.ptr_to([stage, warp.first_row + r * 16 + lane % 16, step * (2 * vector) + lane // 16 * vector]),
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
def _clear(acc, count):
    for x in T.unroll(count):
        acc[x] = T.float32(0)


@T.inline
def _multiply_scaled(warp, acc, scheduler, at):
    """Multiply a k-tile, and add its sums times the scales of their rows and columns; `at` is which one, and its stage."""
    kernel, spec = T.meta_var((warp.kernel, warp.kernel.spec))
    of_a, of_b = meta_vars(warp.args.scales)
    rows, columns = meta_vars(kernel.fragments)
    k_tile, stage = meta_vars(at)
    scale_step = T.meta_var(k_tile * kernel.k_tile // SCALE_COLUMNS)
    blocks = T.meta_var(-(-spec.n // SCALE_COLUMNS))
    block = T.meta_var((scheduler.column * kernel.params.block_n + warp.first_column) // SCALE_COLUMNS)
    factors = T.alloc_local((2 * rows,), "float32")
    sums = T.alloc_local((kernel.params.accumulators,), "float32")
    for r in T.unroll(2 * rows):
        row = T.meta_var(T.min(scheduler.row + warp.first_row + r * 8 + warp.lane // 4, spec.places - 1))
        column = T.meta_var((scheduler.segment * blocks + T.min(block, blocks - 1)) * spec.scale_steps + scale_step)
        factors[r] = of_a[row * spec.scale_steps + scale_step] * of_b[column]
    _clear(sums, kernel.params.accumulators)
    _multiply(warp, sums, stage)
    for r in T.unroll(2 * rows):
        for c in T.unroll(2 * columns):
            for x in T.unroll(2):
                place = T.meta_var(((r // 2 * columns + c // 2) * 2 + c % 2) * 4 + r % 2 * 2 + x)
                acc[place] = acc[place] + sums[place] * factors[r]


@T.inline
def _store(warp, acc, scheduler):
    """Store the rows of a tile that are the segment's, each thread its own results in pairs."""
    kernel, spec, out = T.meta_var((warp.kernel, warp.kernel.spec, warp.args.c))
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
    _clear(acc, kernel.params.accumulators)
    if scheduler.segment < kernel.spec.groups:
        for ahead in T.unroll(stages - 1):
            _copy(warp, scheduler, ahead, ahead)
        for i in T.serial(kernel.k_tiles):
            T.ptx.cp.async_.wait_group(stages - 2)
            T.cuda.cta_sync()
            _copy(warp, scheduler, (i + (stages - 1)) % stages, i + (stages - 1))
            if kernel.sizes.is_scaled:
                _multiply_scaled(warp, acc, scheduler, (i, i % stages))
            else:
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
    a = pool.alloc((kernel.params.stages, kernel.params.block_m, kernel.k_tile + kernel.vector), kernel.spec.dtype, align=128)
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


def _flat(buffers: Sequence[Any]) -> tuple[Any, ...]:
    """Return buffers with one dimension; within the kernel alone."""
    return tuple(T.decl_buffer((math.prod(map(int, each.shape)),), str(each.dtype), data=each.data) for each in buffers)


def build(kernel: MmaGroupedKernel) -> tvm.IRModule:
    """Return a module whose `main` is the grouped GEMM."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in kernel.spec.arguments}
    *operands, sizes, c = buffers.values()
    a, b = operands[:: 2 if kernel.sizes.is_scaled else 1]
    scales = operands[1::2] if kernel.sizes.is_scaled else []
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
        args = T.meta_var(Args(flat_a, flat_b, flat_c, _flat(scales)))
        _run(kernel, args, sizes, (block, warp, lane))

    func = tirx.PrimFunc(list(buffers.values()), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
