"""Owns the kernel of GEMMs of few rows with integer weights on CPUs: weights become float32 in registers, vectors along k.

Knows nothing of how its parameters are chosen or of how a function is recognised.

Weights of 4 bits lie two in a byte, neighbours along k. A vector of bytes has the even places in its low nibbles and the odd ones in its
high nibbles, so A is copied once to float32, even places and odd ones apart: a plane for each weight of a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.ir import Range
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.sym import Analyzer
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import CpuQuantizedParams
from kerneldecl.templates.cpu.splice import Element, Splice
from kerneldecl.templates.cpu.vectors import kept, load, loop, parallel, spread, store, variable

TASK_TILES = 8
"""Register tiles of weights of a task."""


@dataclass(frozen=True)
class QuantizedGemm:
    """C = epilogue(A @ W^T) with W in integers, as it was read from a function."""

    args: tuple[Any, ...]
    """Buffers of the function, C last."""
    m: int
    n: int
    k: int
    planes: int
    """Weights of a byte."""
    group: int
    """Neighbours along k that share all factors; k where all do."""
    a: Element
    """Of a row and a place along k."""
    codes: int
    """Position of W among the arguments."""
    weight: Element
    """Of a column of C and a place along k, in float32."""
    weight_dtype: str
    """What the function rounds weights to before it multiplies them."""
    sums: Any
    """The buffer that the results are read from before the epilogue."""
    result: Element
    """Of a row and a column: C's element."""


@dataclass(frozen=True)
class Tiles:
    """Register tiles of a GEMM of few rows: some rows of A by some of W."""

    gemm: QuantizedGemm
    params: CpuQuantizedParams

    @property
    def tile_m(self) -> int:
        return min(self.params.tile_m, self.gemm.m)

    @property
    def rows(self) -> int:
        return min(self.params.rows, self.gemm.n)

    def first_row(self, strip: Any) -> Any:
        """Return the first row of a strip of A: the last one begins earlier, so that it is whole."""
        return tirx.min(strip * self.tile_m, T.int64(self.gemm.m - self.tile_m))


@dataclass(frozen=True)
class Kernel(Tiles):
    """One kernel, while it is written."""

    lanes: int
    splice: Splice
    strips: Any
    """A in float32, in the order in which tiles read it: [strips, steps, planes, tile_m, lanes]."""


def build(gemm: QuantizedGemm, params: CpuQuantizedParams, lanes: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, with vectors of so many float32."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = tuple(T.arg(f"arg{at}", T.Buffer(tuple(each.ty.shape), str(each.ty.dtype))) for at, each in enumerate(gemm.args))
        splice = Splice(gemm.args, args, gemm.sums)
        tile_m = min(params.tile_m, gemm.m)
        strips = -(-gemm.m // tile_m)
        copy = T.alloc_buffer((strips, gemm.k // (gemm.planes * lanes), gemm.planes, tile_m, lanes), "float32")
        kernel = Kernel(gemm, params, lanes, splice, copy)
        _copy(kernel)
        tiles = -(-gemm.n // kernel.rows)
        with parallel(-(-tiles // TASK_TILES)) as task, loop(TASK_TILES) as tile:
            # The last tiles begin earlier, so that they are whole.
            column = T.bind(tirx.min((task * TASK_TILES + tile) * kernel.rows, T.int64(gemm.n - kernel.rows)))
            with loop(strips) as strip:
                _tile(kernel, strip, column)
    return tvm.IRModule({"main": builder.get()})


def _copy(kernel: Kernel) -> None:
    """Copy A to float32 in strips: rows of a power of two of bytes would meet in few sets of the L1 cache."""
    gemm, lanes = kernel.gemm, kernel.lanes
    strips, steps, planes, tile_m, _ = kernel.strips.shape
    with loop(strips) as strip, loop(tile_m) as row, loop(steps) as step, loop(lanes) as lane:
        for plane in range(int(planes)):
            index = (kernel.first_row(strip) + row, (step * lanes + lane) * gemm.planes + plane)
            value = Analyzer().simplify(kernel.splice.of(gemm.a, index))
            T.buffer_store(kernel.strips, value.astype("float32"), [strip, step, plane, row, lane])


def _tile(kernel: Kernel, strip: Any, column: Any) -> None:
    """Compute a register tile: dot products of some rows of A and of W, each in a vector of partial sums."""
    gemm, lanes = kernel.gemm, kernel.lanes
    sums = [[variable(lanes) for _ in range(kernel.tile_m)] for _ in range(kernel.rows)]
    for several in sums:
        for total in several:
            store(total, (0,), spread(0.0, lanes))
    steps = gemm.group // (gemm.planes * lanes)
    with loop(gemm.k // gemm.group) as group, loop(steps) as step:
        for plane in range(gemm.planes):
            weights = [_weights(kernel, column + at, (group, step, plane), steps) for at in range(kernel.rows)]
            for number in range(kernel.tile_m):
                vector = kept(load(kernel.strips, (strip, group * steps + step, plane, number, 0), lanes))
                for several, weight in zip(sums, weights, strict=True):
                    store(several[number], (0,), load(several[number], (0,), lanes) + weight * vector)
    for at, several in enumerate(sums):
        for number, total in enumerate(several):
            index = (kernel.first_row(strip) + number, column + at)
            T.buffer_store(kernel.splice.args[-1], kernel.splice.of(gemm.result, index, summed(total, lanes)), list(index))


def _weights(kernel: Kernel, column: Any, place: tuple[Any, Any, int], steps: int) -> Any:
    """Return a vector of dequantised weights: of a byte vector of a group, those of one plane."""
    gemm, lanes = kernel.gemm, kernel.lanes
    group, step, plane = place
    found = variable(lanes)
    with T.vectorized(lanes) as lane:
        analyzer = Analyzer()
        for var, extent in ((lane, lanes), (step, steps), (group, gemm.k // gemm.group)):
            analyzer.bind(var, Range(0, extent))
        k = group * gemm.group + (step * lanes + lane) * gemm.planes + plane
        T.buffer_store(found, analyzer.simplify(kernel.splice.of(gemm.weight, (column, k))), [lane])
    return load(found, (0,), lanes)


def summed(total: Any, lanes: int) -> Any:
    """Add up a vector's elements in halves; return the sum."""
    while lanes > 1:
        lanes //= 2
        store(total, (0,), load(total, (0,), lanes) + load(total, (lanes,), lanes)) if lanes > 1 else None
    return total[0] + total[1]
