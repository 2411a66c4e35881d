"""Owns the kernel of a grouped GEMM on CUDA cores: k-tiles through registers to shared memory, outer products in float32.

Knows nothing of how its parameters are chosen. Thread blocks are persistent; where groups lie they find as the kernel on wgmma does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.analysis.matmul_grouped import GroupedSizes
from kerneldecl.analysis.matmul_grouped_simt import K_TILE, PAD, VECTOR, SimtGroupedParams
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.grouped_scheduler import GroupedScheduler, Tables, fill_tables
from kerneldecl.templates.shared.grouped_tiles import GroupedTiles

RASTER_GROUP = 16


@dataclass(frozen=True)
class SimtGroupedKernel(GroupedTiles):
    """One kernel."""

    sizes: GroupedSizes
    params: SimtGroupedParams
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
        return -(-self.spec.k // K_TILE)

    @property
    def widths(self) -> tuple[int, int]:
        """Return the elements of A and of B that a thread copies at once."""
        return self.params.widths(self.sizes)

    @property
    def copies(self) -> tuple[int, int]:
        """Return the vectors of a k-tile of A and of B that a thread copies."""
        (of_a, of_b), (a_width, b_width) = self.params.shares, self.widths
        return of_a // a_width, of_b // b_width

    @property
    def stored_width(self) -> int:
        """Return the results that a thread stores at once: where rows are whole vectors of four, those."""
        return VECTOR if self.spec.n % VECTOR == 0 else 1


class Args(NamedTuple):
    """Arguments of a kernel, flat."""

    a: Any
    b: Any
    c: Any


class Registers(NamedTuple):
    """Registers of a thread."""

    a: Any
    """Its part of the next k-tile of A, as it was loaded."""
    b: Any
    acc: Any
    rows: Any
    """Of one k, the elements of A in its rows."""
    columns: Any


class Thread(NamedTuple):
    """A thread's view of the kernel, while its script is read."""

    kernel: SimtGroupedKernel
    a: Any
    """K-tiles of A in shared memory: which of two, k, row."""
    b: Any
    args: Args
    number: Any
    registers: Registers

    def a_at(self, i: int) -> tuple[Any, Any]:
        """Return row and k, within a tile, of a vector of A that the thread copies."""
        width = self.kernel.widths[0]
        at = i * self.kernel.threads + self.number
        return at // (K_TILE // width), at % (K_TILE // width) * width

    def b_at(self, i: int) -> tuple[Any, Any]:
        """Return column and k, within a tile, of the first element of a vector of B that the thread copies."""
        width = self.kernel.widths[1]
        at = i * self.kernel.threads + self.number
        if self.kernel.sizes.is_k_last:
            return at // (K_TILE // width), at % (K_TILE // width) * width
        per_row = self.kernel.params.block_n // width
        return at % per_row * width, at // per_row

    def row(self, r: int) -> Any:
        """Return which row of the tile a row of the thread is."""
        across = self.kernel.params.block_m // self.kernel.params.thread_m
        return (r // VECTOR * across + self.number // self._side) * VECTOR + r % VECTOR

    def column(self, c: int) -> Any:
        """Return which column of the tile a column of the thread is."""
        return (c // VECTOR * self._side + self.number % self._side) * VECTOR + c % VECTOR

    @property
    def _side(self) -> int:
        """Return the threads along n."""
        return self.kernel.params.block_n // self.kernel.params.thread_n


@T.inline
def _load(to, first, source, place, is_there, width):
    """Load a vector, or set it to zero."""
    if is_there:
        for v in T.vectorized(width):
            to[first + v] = source[place + v]
    else:
        for v in T.unroll(width):
            to[first + v] = T.cast(T.float32(0), source.dtype)


@T.inline
def _fetch(thread, scheduler, k_tile):
    """Load a thread's part of a k-tile: zeros for rows, columns and k that are not there."""
    kernel, spec, registers = T.meta_var((thread.kernel, thread.kernel.spec, thread.registers))
    a, b = meta_vars((thread.args.a, thread.args.b))
    a_width, b_width = meta_vars(kernel.widths)
    a_copies, b_copies = meta_vars(kernel.copies)
    for i in T.unroll(a_copies):
        at, in_tile = meta_vars(thread.a_at(i))
        row, k = meta_vars((scheduler.row + at, k_tile * K_TILE + in_tile))
        _load(registers.a, i * a_width, a, row * spec.k + k, T.And(row < scheduler.end, k < spec.k), a_width)
    for i in T.unroll(b_copies):
        at, in_tile = meta_vars(thread.b_at(i))
        n, k = meta_vars((scheduler.column * kernel.params.block_n + at, k_tile * K_TILE + in_tile))
        group = T.meta_var(scheduler.segment)
        place = T.meta_var((group * spec.n + n) * spec.k + k if kernel.sizes.is_k_last else (group * spec.k + k) * spec.n + n)
        _load(registers.b, i * b_width, b, place, T.And(n < spec.n, k < spec.k), b_width)


@T.inline
def _keep(thread, half):
    """Store a thread's part of a k-tile in shared memory, in float32."""
    kernel, registers = T.meta_var((thread.kernel, thread.registers))
    a_width, b_width = meta_vars(kernel.widths)
    a_copies, b_copies = meta_vars(kernel.copies)
    for i in T.unroll(a_copies):
        row, k = meta_vars(thread.a_at(i))
        for v in T.unroll(a_width):
            thread.a[half, k + v, row] = T.cast(registers.a[i * a_width + v], "float32")
    for i in T.unroll(b_copies):
        column, k = meta_vars(thread.b_at(i))
        for v in T.unroll(b_width):
            if kernel.sizes.is_k_last:
                thread.b[half, k + v, column] = T.cast(registers.b[i * b_width + v], "float32")
            else:
                thread.b[half, k, column + v] = T.cast(registers.b[i * b_width + v], "float32")


@T.inline
def _multiply(thread, half):
    """Add the outer products of a k-tile."""
    params, registers = T.meta_var((thread.kernel.params, thread.registers))
    for k in T.unroll(K_TILE):
        for r in T.unroll(params.thread_m // VECTOR):
            for v in T.vectorized(VECTOR):
                registers.rows[r * VECTOR + v] = thread.a[half, k, thread.row(r * VECTOR) + v]
        for c in T.unroll(params.thread_n // VECTOR):
            for v in T.vectorized(VECTOR):
                registers.columns[c * VECTOR + v] = thread.b[half, k, thread.column(c * VECTOR) + v]
        for r in T.unroll(params.thread_m):
            for c in T.unroll(params.thread_n):
                at = T.meta_var(r * params.thread_n + c)
                registers.acc[at] = registers.acc[at] + registers.rows[r] * registers.columns[c]


@T.inline
def _store(thread, scheduler):
    """Store the rows of a tile that are the segment's, each thread its own results."""
    kernel, params, out = T.meta_var((thread.kernel, thread.kernel.params, thread.args.c))
    spec, width = T.meta_var((kernel.spec, kernel.stored_width))
    results = T.alloc_local((width,), spec.out_dtype)
    for r in T.unroll(params.thread_m):
        row = T.meta_var(scheduler.row + thread.row(r))
        if row < scheduler.end:
            for c in T.unroll(params.thread_n // width):
                column = T.meta_var(scheduler.column * params.block_n + thread.column(c * width))
                if column < spec.n:
                    for v in T.unroll(width):
                        results[v] = T.cast(thread.registers.acc[r * params.thread_n + c * width + v], spec.out_dtype)
                    for v in T.vectorized(width):
                        out[row * spec.n + column + v] = results[v]


@T.inline
def _tile(thread, scheduler):
    """Compute a tile: zeros where its rows belong to no group."""
    kernel = T.meta_var(thread.kernel)
    for x in T.unroll(kernel.params.thread_m * kernel.params.thread_n):
        thread.registers.acc[x] = T.float32(0)
    if scheduler.segment < kernel.spec.groups:
        _fetch(thread, scheduler, 0)
        _keep(thread, 0)
        T.cuda.cta_sync()
        for i in T.serial(kernel.k_tiles):
            if i + 1 < kernel.k_tiles:
                _fetch(thread, scheduler, i + 1)
            _multiply(thread, i % 2)
            # Half of shared memory that nobody reads any more: all have passed the barrier behind its k-tile.
            if i + 1 < kernel.k_tiles:
                _keep(thread, (i + 1) % 2)
            T.cuda.cta_sync()
    _store(thread, scheduler)


def _registers(kernel: SimtGroupedKernel) -> Registers:
    params, dtype = kernel.params, kernel.spec.dtype
    (a_width, b_width), (a_copies, b_copies) = kernel.widths, kernel.copies
    return Registers(
        a=T.alloc_local((a_copies * a_width,), dtype),
        b=T.alloc_local((b_copies * b_width,), dtype),
        acc=T.alloc_local((params.thread_m * params.thread_n,), "float32"),
        rows=T.alloc_local((params.thread_m,), "float32"),
        columns=T.alloc_local((params.thread_n,), "float32"),
    )


@T.inline
def _run(kernel, args, sizes, ids):
    """Have a thread block take its tiles one after the other."""
    block, warp, lane = meta_vars(ids)
    pool = T.SMEMPool()
    a = pool.alloc((2, K_TILE, kernel.params.block_m + PAD), "float32", align=128)
    b = pool.alloc((2, K_TILE, kernel.params.block_n + PAD), "float32", align=128)
    tables = T.meta_var(Tables.of(pool, kernel))
    pool.commit()
    thread = T.meta_var(Thread(kernel, a, b, args, warp * WARP_LANES + lane, _registers(kernel)))
    fill_tables(kernel, tables, sizes, thread.number)
    scheduler = GroupedScheduler(kernel, tables, block)
    while scheduler.valid():
        _tile(thread, scheduler)
        scheduler.advance()


def build(kernel: SimtGroupedKernel) -> tvm.IRModule:
    """Return a module whose `main` is the grouped GEMM."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in kernel.spec.arguments}
    a, b, sizes, c = buffers.values()
    spec = kernel.spec

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": kernel.params.blocks})
        block = T.cta_id([kernel.clusters])
        warp = T.warp_id([kernel.threads // WARP_LANES])
        lane = T.lane_id([WARP_LANES])
        flat_a = T.decl_buffer((spec.places * spec.k,), spec.dtype, data=a.data)
        flat_b = T.decl_buffer((spec.groups * spec.n * spec.k,), spec.dtype, data=b.data)
        flat_c = T.decl_buffer((spec.places * spec.n,), spec.out_dtype, data=c.data)
        args = T.meta_var(Args(flat_a, flat_b, flat_c))
        _run(kernel, args, sizes, (block, warp, lane))

    func = tirx.PrimFunc(list(buffers.values()), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
