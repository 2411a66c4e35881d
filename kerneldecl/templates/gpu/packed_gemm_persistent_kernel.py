"""Owns persistent kernels of GEMMs with packed 4-bit weights on mma.sync: PDL, the sums over warps and thread blocks, the epilogue.

Knows nothing of how weights are multiplied, where activations are or of how parameters are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.matmul_packed import PARTIAL_PADDING, PackedSizes
from kerneldecl.analysis.matmul_packed_persistent import PersistentParams
from kerneldecl.templates.gpu.packed_gemm_kernel import flat, meet, store
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.read_quantized import QuantizedGemm


@dataclass(frozen=True)
class PersistentKernel:
    """One kernel."""

    problem: QuantizedGemm
    sizes: PackedSizes
    params: PersistentParams
    pdl: bool
    """Whether the kernel overlaps the end of the preceding one."""
    functions: tuple[str, str, str]
    """Names of the two functions, and their CUDA, of which one prefetches a warp's first weights to L2, and the other leaves sums."""
    smem_bytes: int
    """Shared memory of a thread block, at whose begin these sums are."""
    min_blocks: int = 0
    """Thread blocks for which an SM must have registers; 0 leaves it to nvcc how many a thread has."""

    @property
    def results(self) -> int:
        """Results of a thread block's tiles, or a cluster's."""
        return self.params.tiles * self.sizes.m * self.params.rows

    @property
    def sum_shape(self) -> tuple[int, int, int, int]:
        return self.params.parts, self.params.summed_tiles, self.sizes.m, self.params.rows + PARTIAL_PADDING

    def place(self, at: Any) -> tuple[Any, Any, Any]:
        """Return tile, row of activations and row of weights of a result."""
        rows, m = self.params.rows, self.sizes.m
        return at // (m * rows), at // rows % m, at % rows

    def tile(self, block: Any, turn: Any) -> Any:
        return block + turn * self.params.blocks(self.sizes)

    def first_row(self, tile: Any) -> Any:
        """Return the first row of a tile: the last one shares rows with its neighbour where tiles would have more rows than there are."""
        rows, n = self.params.rows, self.sizes.n
        return tile * rows if n % rows == 0 else T.min(tile * rows, n - rows)


@T.inline
def _add_parts(kernel, sums, turn, column, row, total):
    """Add up what warps left of a result."""
    total[0] = T.float32(0)
    for part in T.unroll(kernel.params.parts):
        total[0] = total[0] + sums[part, turn, column, row]


@T.inline
def _add_cluster(kernel, sums, turn, column, row, total):
    """Add up what the thread blocks of a cluster have of a result."""
    address = T.alloc_local((1,), "uint32")
    other = T.alloc_local((1,), "float32")
    total[0] = T.float32(0)
    for rank in T.unroll(kernel.params.split_k):
        T.ptx.mapa.shared__cluster.u32(address[0], T.cuda.cvta_generic_to_shared(sums.ptr_to([0, turn, column, row])), T.uint32(rank))
        T.ptx["ld.shared::cluster.f32"](other[0], address[0])
        total[0] = total[0] + other[0]


@T.inline
def _finish(kernel, sums, block, thread):
    """Have a thread block store its results."""
    params, row_tiles = T.meta_var((kernel.params, kernel.params.row_tiles(kernel.sizes)))
    total = T.alloc_local((1,), "float32")
    for i in T.serial(-(-kernel.results // params.threads)):
        at = T.meta_var(i * params.threads + thread)
        turn, column, row = meta_vars(kernel.place(at))
        if T.And(at < kernel.results, kernel.tile(block, turn) < row_tiles):
            _add_parts(kernel, sums, turn, column, row, total)
            store(kernel, total[0], column, kernel.first_row(kernel.tile(block, turn)) + row)


@T.inline
def _finish_cluster(kernel, sums, block, rank, thread):
    """Have a thread block store its share of its cluster's results."""
    params, row_tiles = T.meta_var((kernel.params, kernel.params.row_tiles(kernel.sizes)))
    total = T.alloc_local((1,), "float32")
    if params.parts > 1:
        for i in T.serial(-(-kernel.results // params.threads)):
            own = T.meta_var(i * params.threads + thread)
            turn, column, row = meta_vars(kernel.place(own))
            if T.And(own < kernel.results, kernel.tile(block, turn) < row_tiles):
                _add_parts(kernel, sums, turn, column, row, total)
                sums[0, turn, column, row] = total[0]
    meet()
    for i in T.serial(-(-kernel.results // (params.threads * params.split_k))):
        at = T.meta_var((i * params.split_k + rank) * params.threads + thread)
        turn, column, row = meta_vars(kernel.place(at))
        if T.And(at < kernel.results, kernel.tile(block, turn) < row_tiles):
            _add_cluster(kernel, sums, turn, column, row, total)
            store(kernel, total[0], column, kernel.first_row(kernel.tile(block, turn)) + row)
    # No thread block leaves while others still read its shared memory.
    meet()


@T.inline
def _run(kernel, ids):
    """Compute a thread block's tiles."""
    block, rank, warp, lane = meta_vars(ids)
    prefetch, multiply, source = meta_vars(kernel.functions)
    weights = T.meta_var(kernel.problem.weights)
    pool = T.SMEMPool()
    memory = pool.alloc((kernel.smem_bytes,), "uint8", align=VECTOR_BYTES)
    end = T.meta_var(pool.offset)
    pool.move_base_to(0)
    sums = pool.alloc(kernel.sum_shape, "float32", align=VECTOR_BYTES)
    pool.move_base_to(end)
    pool.commit()
    values = T.meta_var(flat(weights.values))
    scales = T.meta_var(flat(weights.scales))
    zeros = T.meta_var(scales if weights.zeros is None else flat(weights.zeros))
    activations = T.meta_var(flat(kernel.problem.gemm.a.buffer))
    if kernel.pdl:
        # The next kernel may start as soon as SMs have room: it waits, as this one does, until its preceding kernel has ended.
        T.ptx.griddepcontrol.launch_dependents()
        if kernel.params.prefetch > 0:
            T.cuda.func_call(prefetch, values, scales, zeros, block, rank, warp, lane, source_code=source)
        T.ptx.griddepcontrol.wait()
    T.cuda.func_call(multiply, values, scales, zeros, activations, memory.ptr_to([0]), block, rank, warp, lane, source_code=source)
    if kernel.params.split_k > 1:
        _finish_cluster(kernel, sums, block, rank, warp * WARP_LANES + lane)
    else:
        _finish(kernel, sums, block, warp * WARP_LANES + lane)


def build(kernel: PersistentKernel) -> tvm.IRModule:
    """Return a module whose `main` is the GEMM."""
    params = kernel.params

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        if kernel.min_blocks > 0:
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": kernel.min_blocks})
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([params.split_k]) if params.split_k > 1 else T.meta_var(0)
        block = T.cta_id([params.blocks(kernel.sizes) * params.split_k])
        warp = T.warp_id([params.warps])
        lane = T.lane_id([WARP_LANES])
        _run(kernel, (block // params.split_k, rank, warp, lane))

    func = tirx.PrimFunc(list(kernel.problem.func_params), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
