"""Owns the kernel of GEMMs of int8 by int8 on CPUs, both contiguous along k: dot products of bytes, in vectors of partial sums.

Knows nothing of how its parameters are chosen or of how a function is recognised.

vpdpbusd multiplies unsigned bytes by signed ones. A is copied once with 128 added, and accumulators begin with minus 128 times the sums of
the weights. Whatever wraps around on the way, the last sums are exact modulo 2^32, as int32 is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import CpuInt8Params
from kerneldecl.templates.cpu.splice import Element, Splice
from kerneldecl.templates.cpu.vectors import elements, kept, loop, parallel, store, variable

TASK_TILES = 8
"""Register tiles of weights of a task."""
PAIRS = {64: "llvm.x86.avx512.pmaddw.d.512", 32: "llvm.x86.avx2.pmadd.wd"}
VNNI = "llvm.x86.avx512.vpdpbusd.512"


@dataclass(frozen=True)
class Int8Gemm:
    """C = epilogue(A @ W^T) of int8, with int32 sums, as it was read from a function."""

    args: tuple[Any, ...]
    """Buffers of the function, C last."""
    m: int
    n: int
    k: int
    a: int
    """Position of A among the arguments."""
    weights: int
    """Position of W."""
    sums: Any
    """The buffer that the results are read from before the epilogue."""
    result: Element
    """Of a row and a column: C's element."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, while it is written."""

    gemm: Int8Gemm
    params: CpuInt8Params
    vector_bytes: int
    splice: Splice
    rows: Any
    """A, [m, k], as the instruction takes it."""

    @property
    def tile_m(self) -> int:
        return min(self.params.tile_m, self.gemm.m)

    @property
    def tile_n(self) -> int:
        return min(self.params.tile_n, self.gemm.n)

    @property
    def lanes(self) -> int:
        """Return the sums of a vector."""
        return self.vector_bytes // 4

    @property
    def width(self) -> int:
        """Return the elements along k of a vector."""
        return width_of(self.params.dot, self.vector_bytes)

    def weight(self, column: Any, step: Any) -> Any:
        """Return a vector of a row of W as the instruction takes it."""
        bytes_ = elements(self.splice.args[self.gemm.weights], (column, step * self.width), self.width)
        return bytes_ if self.params.dot == "vnni" else kept(tirx.Cast(f"int16x{self.width}", bytes_))

    def added(self, total: Any, row: Any, weight: Any) -> None:
        """Add the products of two vectors to a vector of sums."""
        sums = elements(total, (0,), self.lanes)
        dtype = f"int32x{self.lanes}"
        if self.params.dot == "vnni":
            store(total, (0,), tirx.call_llvm_pure_intrin(dtype, VNNI, sums, row, weight))
        else:
            store(total, (0,), sums + tirx.call_llvm_pure_intrin(dtype, PAIRS[self.vector_bytes], row, weight))


def width_of(dot: str, vector_bytes: int) -> int:
    """Return the elements along k that an instruction multiplies."""
    return vector_bytes if dot == "vnni" else vector_bytes // 2


def build(gemm: Int8Gemm, params: CpuInt8Params, vector_bytes: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = tuple(T.arg(f"arg{at}", T.Buffer(tuple(each.ty.shape), str(each.ty.dtype))) for at, each in enumerate(gemm.args))
        rows = T.alloc_buffer((gemm.m, gemm.k), "int8" if params.dot == "vnni" else "int16")
        kernel = Kernel(gemm, params, vector_bytes, Splice(gemm.args, args, gemm.sums), rows)
        _copy(kernel)
        tiles, strips = -(-gemm.n // kernel.tile_n), -(-gemm.m // kernel.tile_m)
        with parallel(-(-tiles // TASK_TILES)) as task, loop(min(tiles, TASK_TILES)) as tile:
            # The last tiles begin earlier, so that they are whole.
            column = T.bind(tirx.min((task * TASK_TILES + tile) * kernel.tile_n, T.int64(gemm.n - kernel.tile_n)))
            offsets = _offsets(kernel, column) if params.dot == "vnni" else None
            with loop(strips) as strip:
                _tile(kernel, T.bind(tirx.min(strip * kernel.tile_m, T.int64(gemm.m - kernel.tile_m))), column, offsets)
    return tvm.IRModule({"main": builder.get()})


def _copy(kernel: Kernel) -> None:
    """Copy A as the instruction takes it: with 128 added, which flips a byte's sign, or as int16."""
    width = kernel.width
    with loop(kernel.gemm.m) as row, loop(kernel.gemm.k // width) as step:
        at = (row, step * width)
        bytes_ = elements(kernel.splice.args[kernel.gemm.a], at, width)
        is_vnni = kernel.params.dot == "vnni"
        store(kernel.rows, at, bytes_ ^ _spread(-128, width) if is_vnni else tirx.Cast(f"int16x{width}", bytes_))


def _offsets(kernel: Kernel, column: Any) -> list[Any]:
    """Return for each row of W of a tile its sums times minus 128, a vector of partial ones."""
    sums = [_zeros(kernel.lanes) for _ in range(kernel.tile_n)]
    with loop(kernel.gemm.k // kernel.width) as step:
        for at, total in enumerate(sums):
            kernel.added(total, _spread(-128, kernel.width), kernel.weight(column + at, step))
    for total in sums:
        store(total, (0,), tirx.Broadcast(T.int32(0), kernel.lanes) - elements(total, (0,), kernel.lanes))
    return sums


def _tile(kernel: Kernel, row: Any, column: Any, offsets: Sequence[Any] | None) -> None:
    """Compute a register tile: dot products of some rows of A and of W, each in a vector of partial sums."""
    sums = [[_zeros(kernel.lanes) for _ in range(kernel.tile_m)] for _ in range(kernel.tile_n)]
    for several, offset in zip(sums, offsets or (), strict=False):
        for total in several:
            store(total, (0,), elements(offset, (0,), kernel.lanes))
    with loop(kernel.gemm.k // kernel.width) as step:
        weights = [kernel.weight(column + at, step) for at in range(kernel.tile_n)]
        for number in range(kernel.tile_m):
            vector = elements(kernel.rows, (row + number, step * kernel.width), kernel.width)
            for several, weight in zip(sums, weights, strict=True):
                kernel.added(several[number], vector, weight)
    for number in range(kernel.tile_m):
        for at, several in enumerate(sums):
            index = (row + number, column + at)
            total = tirx.call_llvm_pure_intrin("int32", "llvm.vector.reduce.add", elements(several[number], (0,), kernel.lanes))
            T.buffer_store(kernel.splice.args[-1], kernel.splice.of(kernel.gemm.result, index, _kept_scalar(total)), list(index))


def _zeros(lanes: int) -> Any:
    total = variable(lanes, "int32")
    store(total, (0,), tirx.Broadcast(T.int32(0), lanes))
    return total


def _spread(value: int, lanes: int) -> Any:
    return tirx.Broadcast(T.int8(value), lanes)


def _kept_scalar(value: Any) -> Any:
    name = variable(1, "int32")
    T.buffer_store(name, value, [T.int64(0)])
    return name[T.int64(0)]
