"""Owns the kernel of a grouped GEMM on CPUs: its tasks, panels of weights, register tiles of a group's rows.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.matmul_grouped import CpuGroupedParams
from kerneldecl.compiler.matmul_grouped import SCALE_BLOCK, GroupedSpec
from kerneldecl.templates.cpu.vectors import (
    has_vectors,
    in_float32,
    kept,
    load,
    loop,
    parallel,
    rounded,
    spread,
    store,
    transposed,
    variable,
)


@dataclass(frozen=True)
class Kernel:
    """One kernel, while it is written."""

    spec: GroupedSpec
    params: CpuGroupedParams
    lanes: int
    args: dict[str, Any]

    @property
    def width(self) -> int:
        """Return the columns of a panel."""
        return self.params.vectors * self.lanes

    @property
    def panels(self) -> int:
        return -(-self.spec.n // self.width)

    @property
    def segments(self) -> int:
        """Return the runs of rows: one for each group, and one of rows of no group behind the last."""
        return self.spec.groups + (0 if self.spec.is_masked else 1)

    def row(self, row: Any) -> tuple[Any, ...]:
        """Return the indices of a row among all of A or C."""
        return (row // self.spec.rows, row % self.spec.rows) if self.spec.is_masked else (row,)

    def size(self, group: Any) -> Any:
        sizes = self.args["counts" if self.spec.is_masked else "offsets"]
        return tirx.max(tirx.min(tirx.Cast("int64", sizes[group]), T.int64(self.spec.rows)), T.int64(0))

    def begin(self, group: Any) -> Any:
        """Return the first row of a group, or of those of no group, where groups follow one another."""
        # Not Select: what its condition says simplifies the index, and then both of its values are loaded.
        return tirx.if_then_else(group > 0, self.size(tirx.max(group - 1, T.int64(0))), T.int64(0))


class _Panel(NamedTuple):
    """What a task computes: columns of a run of rows."""

    segment: Any
    column: Any
    """The first one."""


def build(spec: GroupedSpec, params: CpuGroupedParams, lanes: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, with vectors of so many float32."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = {name: T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in spec.arguments}
        kernel = Kernel(spec, params, lanes, args)
        # Groups are unlike each other: a thread has some panels of all of them.
        with parallel(kernel.panels * kernel.segments) as task:
            ahead = _Panel(T.bind((task + 1) % kernel.segments), T.bind((task + 1) // kernel.segments * kernel.width))
            _task(kernel, _Panel(T.bind(task % kernel.segments), T.bind(task // kernel.segments * kernel.width)), ahead)
    return tvm.IRModule({"main": builder.get()})


def _task(kernel: Kernel, panel: _Panel, ahead: _Panel) -> None:
    """Compute a panel of columns of a group's rows; those behind, of no group, are zero. The task ahead has another panel."""
    spec, (segment, column) = kernel.spec, panel
    if spec.is_masked:
        first = T.bind(segment * spec.rows)
        end = T.bind(first + kernel.size(segment))
        _multiply(kernel, panel, (first, end), ahead)
        _clear(kernel, column, (end, first + spec.rows))
        return
    first = T.bind(kernel.begin(segment))
    with T.If(segment < spec.groups):
        with T.Then():
            _multiply(kernel, panel, (first, kernel.size(tirx.min(segment, T.int64(spec.groups - 1)))), ahead)
        with T.Else():
            _clear(kernel, column, (first, T.int64(spec.rows)))


def _clear(kernel: Kernel, column: Any, rows: tuple[Any, Any]) -> None:
    """Set rows from the first to the one before the last to zero, in a panel's columns."""
    first, end = rows
    with loop(tirx.max(end - first, T.int64(0))) as row, loop(tirx.min(T.int64(kernel.width), kernel.spec.n - column)) as at:
        T.buffer_store(kernel.args["C"], rounded(T.float32(0), kernel.spec.out_dtype), [*kernel.row(first + row), column + at])


def _multiply(kernel: Kernel, at: _Panel, rows: tuple[Any, Any], ahead: _Panel) -> None:
    """Multiply a group's rows by a panel of its weights, a register tile after the other."""
    spec, tile_m, (group, column) = kernel.spec, kernel.params.tile_m, at
    first, end = rows
    count = T.bind(tirx.max(end - first, T.int64(0)))
    with T.If(count > 0), T.Then():
        panel = T.alloc_buffer((spec.k, kernel.width), "float32")
        strip = T.alloc_buffer((tile_m, spec.k), "float32")
        _pack(kernel, panel, group, column)
        with loop((count + tile_m - 1) // tile_m) as tile:
            start = T.bind(tile * tile_m)
            _load_rows(kernel, strip, first + start, count - start)
            _tile(kernel, (panel, strip), (first + start, column), count - start, (tile, ahead))


def _weight(kernel: Kernel, group: Any, column: Any, k: Any) -> Any:
    """Return an element of B in float32, of the last column where there is none."""
    spec, args = kernel.spec, kernel.args
    inside = tirx.min(column, T.int64(spec.n - 1))
    value = in_float32(args["B"][(group, inside, k) if spec.layout == "nt" else (group, k, inside)])
    return value * args["B_scale"][group, inside // SCALE_BLOCK, k // SCALE_BLOCK] if spec.is_scaled else value


def _pack(kernel: Kernel, panel: Any, group: Any, column: Any) -> None:
    """Copy a panel of a group's weights to float32, its columns in vectors: where k is contiguous, in transposed squares."""
    spec, lanes = kernel.spec, kernel.lanes
    in_vectors = has_vectors(spec.dtype) and spec.n >= kernel.width
    whole = spec.k // lanes * lanes if in_vectors and spec.layout == "nt" else 0
    if whole:
        # The last panel's missing columns are the last one again; nobody stores them.
        with loop(whole // lanes) as step:
            for vector in range(0, kernel.width, lanes):
                columns = [tirx.min(column + vector + lane, T.int64(spec.n - 1)) for lane in range(lanes)]
                square = transposed([load(kernel.args["B"], (group, each, step * lanes), lanes) for each in columns])
                for lane, row in enumerate(square):
                    store(panel, (step * lanes + lane, vector), row)
    with loop(spec.k - whole) as k, loop(kernel.width) as at:
        T.buffer_store(panel, _weight(kernel, group, column + at, whole + k), [whole + k, at])


def _load_rows(kernel: Kernel, strip: Any, first: Any, count: Any) -> None:
    """Copy a tile's rows of A to float32; those that are not there are the last one again."""
    spec, lanes, a = kernel.spec, kernel.lanes, kernel.args["A"]
    whole = spec.k // lanes * lanes if has_vectors(spec.dtype) else 0
    with loop(kernel.params.tile_m) as at:
        row = kernel.row(first + tirx.min(at, count - 1))
        if whole:
            with loop(whole // lanes) as step:
                store(strip, (at, step * lanes), load(a, (*row, step * lanes), lanes))
        with loop(spec.k - whole) as rest:
            value = in_float32(a[(*row, whole + rest)])
            if spec.is_scaled:
                value = value * kernel.args["A_scale"][(*row, (whole + rest) // SCALE_BLOCK)]
            T.buffer_store(strip, value, [at, whole + rest])


def _prefetch(kernel: Kernel, tile: Any, ahead: _Panel, k: Any) -> None:
    """Ask for a line of the weights of the task ahead: each of its first tiles has those of one vector of columns, a line for each k.

    Copying a panel is bound by memory, multiplying by arithmetic: so they overlap.
    """
    spec, lanes = kernel.spec, kernel.lanes
    group = tirx.min(ahead.segment, T.int64(spec.groups - 1))
    rows = kernel.size(group) if spec.is_masked else kernel.size(group) - kernel.begin(group)
    along = k % lanes if spec.layout == "nt" else 0
    column = tirx.min(ahead.column + tile * lanes + along, T.int64(spec.n - 1))
    index = (group, column, k // lanes * lanes) if spec.layout == "nt" else (group, k, column)
    with T.If(tirx.And(tile < kernel.params.vectors, rows > 0)), T.Then():
        read, second_level, data = T.int32(0), T.int32(2), T.int32(1)
        T.evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", tirx.address_of(kernel.args["B"][index]), read, second_level, data))


def _tile(kernel: Kernel, operands: tuple[Any, Any], at: tuple[Any, Any], count: Any, ahead: tuple[Any, _Panel]) -> None:
    """Compute a register tile and store the rows and columns that are there."""
    spec, lanes, out = kernel.spec, kernel.lanes, kernel.args["C"]
    panel, strip = operands
    row, column = at
    sums = [variable(kernel.width) for _ in range(kernel.params.tile_m)]
    places = range(0, kernel.width, lanes)
    for total in sums:
        for vector in places:
            store(total, (vector,), spread(0.0, lanes))
    with loop(spec.k) as k:
        if has_vectors(spec.dtype):  # other dtypes are converted one by one, which memory keeps up with
            _prefetch(kernel, *ahead, k)
        vectors = [kept(load(panel, (k, vector), lanes)) for vector in places]
        for number, total in enumerate(sums):
            factor = kept(spread(strip[number, k], lanes))
            for vector, numbers in zip(places, vectors, strict=True):
                store(total, (vector,), load(total, (vector,), lanes) + numbers * factor)
    for number, total in enumerate(sums):
        with T.If(count > number), T.Then(), T.If(column + kernel.width <= spec.n):
            index = kernel.row(row + number)
            with T.Then():
                for vector in places:
                    store(out, (*index, column + vector), load(total, (vector,), lanes))
            with T.Else(), loop(spec.n - column) as each:
                T.buffer_store(out, rounded(total[each], spec.out_dtype), [*index, column + each])
