"""Owns the kernels of split rows: one that computes rows, or two, of which the first leaves what the second needs of all parts.

Knows nothing of how statistics are found or of how parameters are chosen.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES
from kerneldecl.templates.gpu.split_rows_config import Args, Part, SplitRowsKernel
from kerneldecl.templates.gpu.split_rows_statistics import (
    cells_of,
    combine,
    exchange_all,
    find,
    first_element,
    load,
    power,
    reference,
    registers_of,
    to_powers,
)
from kerneldecl.templates.hopper.epilogue import meta_vars


@T.inline
def _result(part, registers, factors, at, value):
    """Compute a result: (element - first - mean) * scale * gamma + beta, or of softmax a power times scale."""
    scale, first, mean = meta_vars(factors)
    if part.kernel.is_softmax:
        value[0] = registers.powers[at] * scale
    else:
        distance = T.meta_var(T.cast(registers.held[at], "float32") - first - mean)
        value[0] = distance * scale * T.cast(registers.gamma[at], "float32")
        if part.args.beta is not None:
            value[0] = value[0] + T.cast(registers.beta[at], "float32")


@T.inline
def _store(part, registers, factors):
    """Compute a thread's results and store them."""
    kernel, width = T.meta_var((part.kernel, part.kernel.params.width))
    out = T.alloc_local((kernel.params.width,), kernel.spec.out_dtype)
    value = T.alloc_local((1,), "float32")
    for s in T.unroll(kernel.steps):
        for w in T.unroll(width):
            _result(part, registers, factors, s * width + w, value)
            out[w] = T.cast(value[0], kernel.spec.out_dtype)
        if part.is_whole(s):
            for w in T.vectorized(width):
                part.args.y[part.offset(s) + w] = out[w]
        elif kernel.is_ragged:
            for w in T.unroll(width):
                if part.has(s, w):
                    part.args.y[part.offset(s) + w] = out[w]


@T.inline
def _finish(part, registers):
    """Compute results of the row's statistics."""
    kernel, stats = T.meta_var((part.kernel, registers.stats))
    if kernel.is_softmax:
        scale: T.float32 = power(reference(registers.own[0]), reference(stats[0])) / stats[1]
        _store(part, registers, (scale, None, None))
    else:
        count = T.meta_var(T.float32(1 / kernel.sizes.columns))
        square: T.float32 = stats[kernel.statistics - 1] * count
        mean: T.float32 = stats[0] * count if kernel.statistics == 2 else T.float32(0)
        # What rounding leaves below zero is zero; NaN stays.
        variance: T.float32 = square - mean * mean
        root: T.float32 = T.rsqrt(T.Select(variance < T.float32(0), T.float32(0), variance) + T.float32(kernel.spec.eps))
        first: T.float32 = first_element(part)
        _store(part, registers, (root, first, mean))


@T.inline
def _begin(kernel):
    """Let the next kernel start as soon as SMs have room: it waits, as this one does, until its preceding kernel has ended."""
    if kernel.pdl:
        T.ptx.griddepcontrol.launch_dependents()
    if kernel.params.cluster > 1:
        T.ptx.barrier.cluster.arrive.release()
    if kernel.pdl:
        T.ptx.griddepcontrol.wait()


@T.inline
def _finish_reduced(part, registers):
    """Have one thread of a row store its result."""
    kernel = T.meta_var(part.kernel)
    factor = T.meta_var(1 / kernel.sizes.columns if kernel.spec.op == "mean" else 1.0)
    if T.And(part.part == 0, part.thread == 0):
        part.args.y[part.row] = T.cast(registers.stats[0] * T.float32(factor), kernel.spec.out_dtype)


@T.inline
def _reduced_rows_kernel(kernel, args, workspace, ids):
    """Reduce what all parts of a row have left."""
    row, rank, thread = meta_vars(ids)
    cells, registers = meta_vars((cells_of(kernel), registers_of(kernel)))
    part = T.meta_var(Part(kernel, args, row, 0, thread))
    _begin(kernel)
    combine(kernel, lambda k, at: workspace[row, k, at], (thread, kernel.params.threads), kernel.params.parts, registers.stats)
    exchange_all(part, cells, registers, rank)
    _finish_reduced(part, registers)


@T.inline
def _one_kernel(kernel, args, _, ids):
    """Compute a thread block's part of a row; its cluster has the others."""
    block, rank, thread = meta_vars(ids)
    cells, registers = meta_vars((cells_of(kernel), registers_of(kernel)))
    part = T.meta_var(Part(kernel, args, block // kernel.params.parts, block % kernel.params.parts, thread))
    _begin(kernel)
    load(part, registers)
    find(part, registers)
    exchange_all(part, cells, registers, rank)
    if kernel.spec.kind == "reduce":
        _finish_reduced(part, registers)
    else:
        _finish(part, registers)


@T.inline
def _statistics_kernel(kernel, args, workspace, ids):
    """Leave the statistics of a thread block's part in the workspace."""
    block, rank, thread = meta_vars(ids)
    cells, registers = meta_vars((cells_of(kernel), registers_of(kernel)))
    part = T.meta_var(Part(kernel, args._replace(gamma=None, beta=None), block // kernel.params.parts, block % kernel.params.parts, thread))
    _begin(kernel)
    load(part, registers)
    find(part, registers)
    exchange_all(part, cells, registers, rank)
    if thread < kernel.statistics:
        for k in T.unroll(kernel.statistics):
            if thread == k:
                workspace[part.row, k, part.part] = registers.stats[k]


@T.inline
def _results_kernel(kernel, args, workspace, ids):
    """Combine what all parts of a row have left, and compute the results of a thread block's part."""
    block, rank, thread = meta_vars(ids)
    cells, registers = meta_vars((cells_of(kernel), registers_of(kernel)))
    part = T.meta_var(Part(kernel, args, block // kernel.params.parts, block % kernel.params.parts, thread))
    _begin(kernel)
    load(part, registers)
    combine(kernel, lambda k, at: workspace[part.row, k, at], (thread, kernel.params.threads), kernel.params.parts, registers.stats)
    exchange_all(part, cells, registers, rank)
    if kernel.is_softmax:
        total: T.float32 = registers.stats[1]
        registers.own[0] = registers.stats[0]
        to_powers(part, registers, reference(registers.own[0]))
        registers.stats[1] = total
    _finish(part, registers)


def _body(kernel: SplitRowsKernel, buffers: dict[str, Any], workspace: Any, work: Any) -> Any:
    """Return the body of a kernel that does some work: thread blocks for parts, or for rows where only their results are left to do."""
    grid, params = kernel.sizes.rows * (1 if work is _reduced_rows_kernel else kernel.params.parts), kernel.params

    @T.prim_func(check_well_formed=False)
    def main():
        T.device_entry()
        if kernel.pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        rank = T.cta_id_in_cluster([params.cluster]) if params.cluster > 1 else T.meta_var(0)
        block = T.cta_id([grid])
        warp = T.warp_id([params.warps])
        lane = T.lane_id([WARP_LANES])
        args = T.meta_var(_flat(buffers))
        work(kernel, args, workspace, (block, rank, warp * WARP_LANES + lane))

    return main.body


def build(kernel: SplitRowsKernel, arguments: list[tuple[str, tuple[int, ...], str]]) -> tvm.IRModule:
    """Return a module whose `main` is the function, with these arguments: name, shape and dtype of each."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in arguments}
    if kernel.params.cluster == kernel.params.parts:
        body = _body(kernel, buffers, None, _one_kernel)
    else:
        workspace = tirx.decl_buffer((kernel.sizes.rows, kernel.statistics, kernel.params.parts), "float32", "part_statistics")
        second = _reduced_rows_kernel if kernel.spec.kind == "reduce" else _results_kernel
        kernels = [_body(kernel, buffers, workspace, work) for work in (_statistics_kernel, second)]
        body = tirx.SeqStmt([tirx.AllocBuffer(workspace), *kernels])
    func = tirx.PrimFunc(list(buffers.values()), body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})


def _flat(buffers: dict[str, Any]) -> Args:
    """Return the arguments with one dimension each."""

    def flat(name: str) -> Any:
        buffer = buffers.get(name)
        return None if buffer is None else T.decl_buffer((math.prod(map(int, buffer.shape)),), str(buffer.dtype), data=buffer.data)

    return Args(*map(flat, ("X", "gamma", "beta", "Y")))
