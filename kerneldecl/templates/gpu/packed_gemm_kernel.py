"""Owns the kernel of a GEMM with packed 4-bit weights on mma.sync: PDL, the sums over warps and thread blocks, the epilogue.

Knows nothing of how weights are multiplied or of how parameters are chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import VECTOR_BYTES, WARP_LANES
from kerneldecl.analysis.matmul_packed import FIRST_CAPABILITY, PARTIAL_PADDING, PackedParams, PackedSizes
from kerneldecl.analysis.packed_weights import TILE_ROWS
from kerneldecl.model import Gpu
from kerneldecl.templates.gpu.packed_gemm_source import multiply_source
from kerneldecl.templates.hopper.epilogue import meta_vars
from kerneldecl.templates.hopper.read_quantized import QuantizedGemm, read_quantized


@dataclass(frozen=True)
class PackedKernel:
    """One kernel."""

    problem: QuantizedGemm
    sizes: PackedSizes
    params: PackedParams
    pdl: bool
    """Whether the kernel overlaps the end of the preceding one."""

    @property
    def received_shape(self) -> tuple[int, int]:
        """Shape of what the thread blocks of a cluster, this one among them, sent of its share of results."""
        return self.params.split_k, self.params.share(self.sizes)

    def first_row(self, block: Any) -> Any:
        """Return the first row of a thread block's weights: where blocks have more rows than there are, neighbours share some."""
        blocks, spare = self.params.row_blocks(self.sizes), self.sizes.n - self.params.block_rows
        return block * (spare // TILE_ROWS) // max(1, blocks - 1) * TILE_ROWS

    @property
    def partial_shape(self) -> tuple[int, int, int]:
        return self.params.warps_k, self.sizes.m, self.params.block_rows + PARTIAL_PADDING


class Params(Protocol):
    """Parameters of a kernel of such GEMMs."""

    def fits(self, sizes: PackedSizes, gpu: Gpu) -> bool: ...


def problem_of(mod: tvm.IRModule, params: Params, gpu: Gpu) -> tuple[QuantizedGemm, PackedSizes] | None:
    """Return the GEMM that a module's `main` computes, and its sizes; None where it is another computation or the parameters do not fit."""
    problem = read_quantized(mod) if gpu.compute_capability >= FIRST_CAPABILITY else None
    sizes = _sizes_of(problem) if problem is not None else None
    return (problem, sizes) if problem is not None and sizes is not None and params.fits(sizes, gpu) else None


def _sizes_of(problem: QuantizedGemm) -> PackedSizes | None:
    """Return the sizes of a GEMM whose sums are float32 and whose rows of activations follow each other, contiguous along k; else None."""
    a, weights, (_, m, n, k) = problem.gemm.a, problem.weights, problem.gemm.extents
    is_dense = a.columns == (k, 1) and (a.rows[0] == 1 or a.rows[1] == k)
    if not is_dense or problem.gemm.contraction.accum_dtype != "float32":
        return None
    return PackedSizes(m, n, k, weights.group, str(weights.scales.dtype), weights.zeros is not None)


def flat(buffer: Any) -> Any:
    """Return a pointer to an argument's first element."""
    count = math.prod(int(extent) for extent in buffer.shape)
    return T.decl_buffer((count,), str(buffer.dtype), data=buffer.data).ptr_to([0])


@T.inline
def meet():
    """Have the thread blocks of a cluster wait for each other."""
    T.ptx.barrier.cluster.arrive.release.aligned()
    T.ptx.barrier.cluster.wait.acquire.aligned()


@T.inline
def _add_warps(kernel, partials, column, row, total):
    """Add up what warps along k left of a result."""
    total[0] = T.float32(0)
    for warp in T.unroll(kernel.params.warps_k):
        total[0] = total[0] + partials[warp, column, row]


@T.inline
def store(kernel, total, column, row):
    """Store a result, with the epilogue."""
    gemm = T.meta_var(kernel.problem.gemm)
    gemm.out.buffer[tuple(gemm.index_out(0, column, row))] = gemm.value(total, 0, column, row, gemm.aux(0, column, row))


@T.inline
def _finish(kernel, partials, received, block, rank, thread):
    """Have a thread block store its rows' results, or its share of them."""
    params, rows = T.meta_var((kernel.params, kernel.params.block_rows))
    results, share = T.meta_var((params.results(kernel.sizes), params.share(kernel.sizes)))
    total = T.alloc_local((1,), "float32")
    first_row = T.meta_var(kernel.first_row(block))
    if params.split_k > 1:
        for i in T.serial(-(-share // params.threads)):
            own = T.meta_var(i * params.threads + thread)
            at = T.meta_var(rank * share + own)
            if (own < share) & (at < results):
                total[0] = T.float32(0)
                for sender in T.unroll(params.split_k):
                    total[0] = total[0] + received[sender, own]
                store(kernel, total[0], at // rows, first_row + at % rows)
    else:
        for i in T.serial(-(-results // params.threads)):
            at = T.meta_var(i * params.threads + thread)
            if at < results:
                _add_warps(kernel, partials, at // rows, at % rows, total)
                store(kernel, total[0], at // rows, first_row + at % rows)


@T.inline
def _run(kernel, ids):
    """Compute a thread block's rows of weights."""
    block, rank, warp, lane = meta_vars(ids)
    prefetch, prepare, multiply, source = meta_vars(multiply_source(kernel.sizes, kernel.params, kernel.problem.gemm.a.dtype))
    weights = T.meta_var(kernel.problem.weights)
    pool = T.SMEMPool()
    memory = pool.alloc((kernel.params.smem_bytes(kernel.sizes),), "uint8", align=VECTOR_BYTES)
    end = T.meta_var(pool.offset)
    pool.move_base_to(0)
    partials = pool.alloc(kernel.partial_shape, "float32", align=VECTOR_BYTES)
    pool.move_base_to(kernel.params.received_offset(kernel.sizes))
    received = pool.alloc(kernel.received_shape, "float32", align=VECTOR_BYTES) if kernel.params.split_k > 1 else T.meta_var(None)
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
    if kernel.params.split_k > 1 or kernel.params.keeps_steps:
        T.cuda.func_call(prepare, memory.ptr_to([0]), rank, warp * WARP_LANES + lane, source_code=source)
    if kernel.pdl:
        T.ptx.griddepcontrol.wait()
    T.cuda.func_call(multiply, values, scales, zeros, activations, memory.ptr_to([0]), block, rank, warp, lane, source_code=source)
    _finish(kernel, partials, received, block, rank, warp * WARP_LANES + lane)


def build(kernel: PackedKernel) -> tvm.IRModule:
    """Return a module whose `main` is the GEMM."""
    params = kernel.params

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([params.split_k]) if params.split_k > 1 else T.meta_var(0)
        block = T.cta_id([params.row_blocks(kernel.sizes) * params.split_k])
        warp = T.warp_id([params.threads // WARP_LANES])
        lane = T.lane_id([WARP_LANES])
        _run(kernel, (block // params.split_k, rank, warp, lane))

    func = tirx.PrimFunc(list(kernel.problem.func_params), main.body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})
