"""Owns the kernel of GEMMs of few rows of bfloat16 with weights of 4 or 8 bits on CPUs: weights in bfloat16, dot products of pairs.

Knows nothing of how its parameters are chosen, of how a function is recognised or of how weights become bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import CpuQuantizedParams
from kerneldecl.templates.cpu.bf16_weights import LANES, LLVM, PAIRS, STEP, Weights, dot
from kerneldecl.templates.cpu.quantized_kernel import TASK_TILES, QuantizedGemm, Tiles, summed
from kerneldecl.templates.cpu.splice import Splice
from kerneldecl.templates.cpu.vectors import elements, kept, load, loop, parallel, spread, store, variable


@dataclass(frozen=True)
class Kernel(Tiles):
    """One kernel, while it is written."""

    splice: Splice
    strips: Any
    """A, pairs of bfloat16 as integers: [strips, k / STEP, tile_m, LANES]."""
    weights: Weights


def build(gemm: QuantizedGemm, params: CpuQuantizedParams, a: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel; A is the argument at this position."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = tuple(T.arg(f"arg{at}", T.Buffer(tuple(each.ty.shape), str(each.ty.dtype))) for at, each in enumerate(gemm.args))
        tile_m = min(params.tile_m, gemm.m)
        strips = T.alloc_buffer((-(-gemm.m // tile_m), gemm.k // STEP, tile_m, LANES), "int32")
        kernel = Kernel(gemm, params, Splice(gemm.args, args, gemm.sums), strips, Weights.of(gemm, args))
        _copy(kernel, args[a])
        tiles = -(-gemm.n // kernel.rows)
        with T.attr(T.int32(0), "pragma_import_llvm", LLVM), parallel(-(-tiles // TASK_TILES)) as task, loop(TASK_TILES) as tile:
            # The last tiles begin earlier, so that they are whole.
            column = T.bind(tirx.min((task * TASK_TILES + tile) * kernel.rows, T.int64(gemm.n - kernel.rows)))
            with loop(-(-gemm.m // kernel.tile_m)) as strip:
                _tile(kernel, strip, column)
    return tvm.IRModule({"main": builder.get()})


def _copy(kernel: Kernel, a: Any) -> None:
    """Copy A in the order in which tiles read it: rows of a power of two of bytes would meet in few sets of the L1 cache."""
    strips, steps, tile_m, _ = kernel.strips.shape
    with loop(strips) as strip, loop(tile_m) as row, loop(steps) as step:
        pairs = elements(a, (kernel.first_row(strip) + row, step * STEP), STEP)
        store(kernel.strips, (strip, step, row, 0), tirx.reinterpret(PAIRS, pairs))


def _tile(kernel: Kernel, strip: Any, column: Any) -> None:
    """Compute a register tile: dot products of some rows of A and of W, each in a vector of partial sums."""
    gemm = kernel.gemm
    sums = [[variable(LANES) for _ in range(kernel.tile_m)] for _ in range(kernel.rows)]
    for several in sums:
        for total in several:
            store(total, (0,), spread(0.0, LANES))
    steps, w = gemm.group // STEP, kernel.weights
    with loop(gemm.k // gemm.group) as group:
        tables = [w.table(column + at, group * gemm.group) for at in range(kernel.rows)] if w.has_tables else []
        with loop(steps) as step:
            at_k = T.bind(group * steps + step)
            if tables:
                weights = [w.looked_up(table, column + at, at_k) for at, table in enumerate(tables)]
            else:
                weights = [w.computed(column + at, group, step) for at in range(kernel.rows)]
            for number in range(kernel.tile_m):
                pairs = kept(elements(kernel.strips, (strip, at_k, number, 0), LANES))
                for several, weight in zip(sums, weights, strict=True):
                    total = several[number]
                    store(total, (0,), dot(load(total, (0,), LANES), pairs, weight))
    for at, several in enumerate(sums):
        for number, total in enumerate(several):
            index = (kernel.first_row(strip) + number, column + at)
            T.buffer_store(kernel.splice.args[-1], kernel.splice.of(gemm.result, index, summed(total, LANES)), list(index))
