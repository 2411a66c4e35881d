"""Owns the kernel of GEMMs of any sizes on CPUs: panels of B, columns of C in vectors, register tiles that overlap at the ends.

Knows nothing of how its parameters are chosen or of how a function is recognised.

A is copied once, in the order in which register tiles read it. A task copies a block of B along k into a panel that stays in the L1 or L2
cache, multiplies all its rows of A by it, and keeps sums in memory from one block to the next. In bfloat16, elements are pairs of
neighbours along k: vdpbf16ps accumulates their dot product in float32, twice as many multiplications as by a fused multiply-add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import SERIAL_ELEMENTS, SERIAL_FMAS, CpuPanelParams
from kerneldecl.templates.cpu.bf16_weights import LLVM, PAIRS, Weights, dot
from kerneldecl.templates.cpu.quantized_kernel import QuantizedGemm
from kerneldecl.templates.cpu.splice import Element, Splice
from kerneldecl.templates.cpu.vectors import elements, in_float32, kept, load, loop, parallel, spread, store, transposed, variable


class Stored(NamedTuple):
    """A matrix among the arguments: its position, and its dimensions that batch axes, rows (of B columns) and k (of C columns) index."""

    position: int
    batch: tuple[int, ...]
    """For each dimension the batch axis that indexes it, -1 for those of the other two."""
    row_dim: int
    column_dim: int

    def indices(self, outer: Sequence[Any], row: Any, column: Any) -> list[Any]:
        """Return the indices of an element."""
        found = [row if axis < 0 else outer[axis] for axis in self.batch]
        found[self.column_dim] = column
        return found

    @property
    def is_along_k(self) -> bool:
        return self.column_dim == len(self.batch) - 1


@dataclass(frozen=True)
class PanelGemm:
    """C = epilogue(A @ B) with float32 sums, as it was read from a function."""

    args: tuple[Any, ...]
    """Buffers of the function, C last."""
    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    a: Stored
    b: Stored | QuantizedGemm
    """B, or how it is dequantised."""
    sums: Any
    """The buffer that the results are read from before the epilogue."""
    c: Stored
    result: Element
    """Of C's indices: its element."""
    is_gated: bool
    """Whether an element of C reads several sums of a row, so that all sums come first."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, while it is written."""

    gemm: PanelGemm
    params: CpuPanelParams
    splice: Splice
    lanes: int
    """Sums of a vector."""
    pairs: bool
    """Whether elements are pairs of bfloat16, as integers; else they are float32."""
    strips: Any
    """Elements of A: [*batch, strips, steps, tile_m, lanes]."""
    every: Any | None
    """All sums, [m, n], of a gated GEMM."""

    @property
    def tile_m(self) -> int:
        return min(self.params.tile_m, self.gemm.m)

    @property
    def width(self) -> int:
        """Return the columns of a panel."""
        return min(self.params.vectors, self.gemm.n // self.lanes) * self.lanes

    @property
    def dtype(self) -> str:
        """Return the dtype of elements."""
        return "int32" if self.pairs else "float32"

    @property
    def several(self) -> int:
        """Return the neighbours along k of an element."""
        return 2 if self.pairs else 1

    @property
    def step(self) -> int:
        """Return the neighbours along k of a vector of elements."""
        return self.lanes * self.several

    @property
    def steps(self) -> int:
        return -(-self.gemm.k // self.step)

    @property
    def block_steps(self) -> int:
        return min(max(1, self.params.block_k // self.step), self.steps)

    @property
    def blocks(self) -> int:
        return -(-self.steps // self.block_steps)

    def first_row(self, strip: Any) -> Any:
        """Return the first row of a strip of A: the last one begins earlier, so that it is whole."""
        return tirx.min(strip * self.tile_m, T.int64(self.gemm.m - self.tile_m))

    def element(self, operand: Stored, outer: Sequence[Any], place: Any, k: Any) -> Any:
        """Return an element of an operand, zero where there is none."""
        arg = self.splice.args[operand.position]

        def value(at: Any) -> Any:
            found = arg[tuple(operand.indices(outer, place, at))]
            wide = tirx.Cast("int32", tirx.reinterpret("uint16", found)) if self.pairs else in_float32(found)
            return tirx.if_then_else(at < self.gemm.k, wide, tirx.const(0, self.dtype))

        return value(k) | value(k + 1) << 16 if self.pairs else value(k)

    def along_k(self, operand: Stored, outer: Sequence[Any], place: Any, k: Any) -> Any:
        """Return a vector of elements of an operand in which k is contiguous."""
        arg, index = self.splice.args[operand.position], operand.indices(outer, place, k)
        return tirx.reinterpret(PAIRS, elements(arg, index, self.step)) if self.pairs else load(arg, index, self.lanes)

    def along_columns(self, operand: Stored, outer: Sequence[Any], column: Any, k: Any) -> Any:
        """Return a vector of neighbouring columns' elements of an operand in which columns are contiguous."""
        arg = self.splice.args[operand.position]
        if not self.pairs:
            return load(arg, operand.indices(outer, column, k), self.lanes)
        rows = (elements(arg, operand.indices(outer, column, k + half), self.lanes) for half in (0, 1))
        low, high = (tirx.Cast(PAIRS, tirx.reinterpret(f"uint16x{self.lanes}", row)) for row in rows)
        return low | high << tirx.Broadcast(T.int32(16), self.lanes)

    def vector(self, buffer: Any, index: Sequence[Any]) -> Any:
        return elements(buffer, index, self.lanes)

    def added(self, total: Any, at: int, one: Any, other: Any) -> None:
        """Accumulate the multiplication of two vectors of elements."""
        sums = load(total, (at,), self.lanes)
        store(total, (at,), dot(sums, one, other) if self.pairs else sums + one * other)


class Task(NamedTuple):
    """What a task computes: columns of some strips of A."""

    outer: list[Any]
    """Indices of batch axes."""
    column: Any
    first: Any
    """The first strip."""
    strips: Any


def build(gemm: PanelGemm, params: CpuPanelParams, lanes: int, *, pairs: bool) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, with vectors of so many sums; `pairs` of bfloat16 are multiplied, or float32."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = tuple(T.arg(f"arg{at}", T.Buffer(tuple(each.ty.shape), str(each.ty.dtype))) for at, each in enumerate(gemm.args))
        tile_m = min(params.tile_m, gemm.m)
        count = -(-gemm.m // tile_m)
        steps = -(-gemm.k // (2 * lanes if pairs else lanes))
        strips = T.alloc_buffer((*gemm.batch, count, steps, tile_m, lanes), "int32" if pairs else "float32")
        every = T.alloc_buffer((gemm.m, gemm.n), "float32") if gemm.is_gated else None
        splice = Splice((*gemm.args, gemm.sums), (*args, every), None) if gemm.is_gated else Splice(gemm.args, args, gemm.sums)
        kernel = Kernel(gemm, params, splice, lanes, pairs, strips, every)
        _copy(kernel)
        panels, per_task = -(-gemm.n // kernel.width), max(1, min(params.block_m // tile_m, count))
        rows = -(-count // per_task)
        with _imported(pairs=pairs), _tasks(math.prod(gemm.batch) * rows * panels, is_small=_is_small(gemm)) as number:
            # The last panel begins earlier, so that it is whole.
            column = T.bind(tirx.min(number % panels * kernel.width, T.int64(gemm.n - kernel.width)))
            first = T.bind(number // panels % rows * per_task)
            outer = _unravelled(number // (panels * rows), gemm.batch)
            _task(kernel, Task(outer, column, first, tirx.min(T.int64(per_task), count - first)), per_task)
        if every is not None:
            _gate(kernel)
    return tvm.IRModule({"main": builder.get()})


def _is_small(gemm: PanelGemm) -> bool:
    return math.prod(gemm.batch) * gemm.m * gemm.n * gemm.k <= SERIAL_FMAS


def _tasks(count: int, *, is_small: bool) -> Any:
    """Return the frame of a loop over tasks, on all cores unless they are small."""
    return loop(count) if is_small else parallel(count)


def _imported(*, pairs: bool) -> Any:
    """Return the frame in which vdpbf16ps can be called, for pairs."""
    return T.attr(T.int32(0), "pragma_import_llvm", LLVM) if pairs else nullcontext()


def _unravelled(number: Any, extents: Sequence[int]) -> list[Any]:
    """Return the indices of an element of a batch."""
    found: list[Any] = []
    for extent in reversed(extents):
        found.insert(0, T.bind(number % extent))
        number = number // extent
    return found


def _copy(kernel: Kernel) -> None:
    """Copy A in the order in which tiles read it: rows of a power of two of bytes would meet in few sets of the L1 cache."""
    gemm, a = kernel.gemm, kernel.gemm.a
    count = int(kernel.strips.shape[-4])
    whole = gemm.k // kernel.step if a.is_along_k else 0
    with _tasks(math.prod(gemm.batch) * count, is_small=math.prod(gemm.batch) * gemm.m * gemm.k <= SERIAL_ELEMENTS) as task:
        strip, outer = T.bind(task % count), _unravelled(task // count, gemm.batch)
        first = T.bind(kernel.first_row(strip))
        if whole:
            with loop(kernel.tile_m) as number, loop(whole) as step:
                store(kernel.strips, (*outer, strip, step, number, 0), kernel.along_k(a, outer, first + number, step * kernel.step))
        # Rows are contiguous where k is not, so they are the inner loop.
        with loop(kernel.steps - whole) as rest, loop(kernel.lanes) as lane, loop(kernel.tile_m) as number:
            value = kernel.element(a, outer, first + number, (whole + rest) * kernel.step + lane * kernel.several)
            T.buffer_store(kernel.strips, value, [*outer, strip, whole + rest, number, lane])


def _task(kernel: Kernel, task: Task, most: int) -> None:
    """Compute a panel of columns of a task's strips, `most` of them at most, a block along k after the other."""
    lanes = kernel.lanes
    panel = T.alloc_buffer((kernel.block_steps * lanes, kernel.width), kernel.dtype)
    sums = T.alloc_buffer((most * kernel.tile_m, kernel.width), "float32")
    with loop(kernel.blocks) as block:
        first = T.bind(block * kernel.block_steps)
        steps = T.bind(tirx.min(T.int64(kernel.block_steps), kernel.steps - first))
        _pack(kernel, panel, task, (block, first, steps))
        with loop(task.strips) as strip:
            _tile(kernel, (panel, sums), (*task.outer, task.first + strip), strip, (block, first, steps))
    with loop(task.strips) as strip, loop(kernel.tile_m) as number:
        row = T.bind(kernel.first_row(task.first + strip) + number)
        for vector in range(0, kernel.width, lanes):
            _store(kernel, (*task.outer, row, task.column + vector), load(sums, (strip * kernel.tile_m + number, vector), lanes))


def _tile(kernel: Kernel, buffers: tuple[Any, Any], source: Sequence[Any], strip: Any, block: tuple[Any, Any, Any]) -> None:
    """Accumulate a block along k in a register tile."""
    panel, kept_sums = buffers
    number, first, steps = block
    lanes, places = kernel.lanes, range(0, kernel.width, kernel.lanes)
    sums = [variable(kernel.width) for _ in range(kernel.tile_m)]
    for row, total in enumerate(sums):
        for vector in places:
            zero = spread(0.0, lanes)
            before = load(kept_sums, (strip * kernel.tile_m + row, vector), lanes)
            store(total, (vector,), zero if kernel.blocks == 1 else tirx.if_then_else(number > 0, before, zero))
    with loop(steps) as step, loop(lanes) as lane:
        vectors = [kept(elements(panel, (step * lanes + lane, vector), lanes)) for vector in places]
        for row, total in enumerate(sums):
            element = kept(tirx.Broadcast(kernel.strips[(*source, first + step, T.int64(row), lane)], lanes))
            for vector, columns in zip(places, vectors, strict=True):
                kernel.added(total, vector, element, columns)
    for row, total in enumerate(sums):
        for vector in places:
            store(kept_sums, (strip * kernel.tile_m + row, vector), load(total, (vector,), lanes))


def _store(kernel: Kernel, index: Sequence[Any], total: Any) -> None:
    """Store a vector of results, from a column on, after the epilogue; of a gated GEMM, the sums."""
    *outer, row, column = index
    if kernel.every is not None:
        store(kernel.every, (row, column), total)
        return
    held = variable(kernel.lanes)
    store(held, (0,), total)
    with T.vectorized(kernel.lanes) as lane:
        at = kernel.gemm.c.indices(outer, row, column + T.int64(1) * lane)
        T.buffer_store(kernel.splice.args[-1], kernel.splice.of(kernel.gemm.result, at, held[lane]), at)


def _gate(kernel: Kernel) -> None:
    """Store what all sums come to, row by row."""
    out, lanes = kernel.splice.args[-2], kernel.lanes
    rows, columns = (int(extent) for extent in out.shape)
    whole = columns // lanes
    with _tasks(rows, is_small=_is_small(kernel.gemm)) as row:
        with loop(whole) as step, T.vectorized(lanes) as lane:
            at = (row, step * lanes + T.int64(1) * lane)
            T.buffer_store(out, kernel.splice.of(kernel.gemm.result, at), list(at))
        with loop(columns - whole * lanes) as rest:
            at = (row, whole * lanes + rest)
            T.buffer_store(out, kernel.splice.of(kernel.gemm.result, at), list(at))


def _pack(kernel: Kernel, panel: Any, task: Task, block: tuple[Any, Any, Any]) -> None:
    """Copy a block of B along k into a panel: vectors of columns."""
    for vector in range(0, kernel.width, kernel.lanes):
        if isinstance(kernel.gemm.b, QuantizedGemm):
            _dequantise(kernel, (panel, vector), task, block)
        else:
            _copy_columns(kernel, (panel, vector), task, block)


def _copy_columns(kernel: Kernel, to: tuple[Any, int], task: Task, block: tuple[Any, Any, Any]) -> None:
    """Copy a vector of columns of B: in transposed squares where k is contiguous, else row by row."""
    (panel, vector), b, lanes = to, kernel.gemm.b, kernel.lanes
    _, first, steps = block
    assert isinstance(b, Stored)
    column, last = task.column + vector, kernel.gemm.k // kernel.step
    whole = tirx.min(steps, last - first)
    with loop(whole) as step:
        k = T.bind((first + step) * kernel.step)
        if b.is_along_k:
            rows = transposed([kernel.along_k(b, task.outer, column + lane, k) for lane in range(lanes)])
            for lane, row in enumerate(rows):
                store(panel, (step * lanes + lane, vector), row)
        else:
            with loop(lanes) as lane:
                row = kernel.along_columns(b, task.outer, column, k + lane * kernel.several)
                store(panel, (step * lanes + lane, vector), row)
    if kernel.gemm.k % kernel.step:
        with loop(steps - whole) as rest, loop(lanes) as lane, loop(lanes) as at:
            value = kernel.element(b, task.outer, column + at, (last + rest) * kernel.step + lane * kernel.several)
            T.buffer_store(panel, value, [(whole + rest) * lanes + lane, vector + at])


def _dequantise(kernel: Kernel, to: tuple[Any, int], task: Task, block: tuple[Any, Any, Any]) -> None:
    """Compute a vector of columns of B, whose weights are rows of W, in pairs and group by group."""
    (panel, vector), gemm, lanes = to, kernel.gemm.b, kernel.lanes
    assert isinstance(gemm, QuantizedGemm)
    _, first, steps = block
    weights, column = Weights.of(gemm, kernel.splice.args), task.column + vector
    steps_of_group = gemm.group // kernel.step
    chunk = math.gcd(steps_of_group, kernel.block_steps)
    with loop(steps // chunk) as part:
        begin = T.bind(first + part * chunk)
        tables = [weights.table(column + lane, begin * kernel.step) for lane in range(lanes)] if weights.has_tables else []
        with loop(chunk) as step:
            if tables:
                rows = [weights.looked_up(table, column + lane, begin + step) for lane, table in enumerate(tables)]
            else:
                group, place = (T.bind(each) for each in ((begin + step) // steps_of_group, (begin + step) % steps_of_group))
                rows = [weights.computed(column + lane, group, place) for lane in range(lanes)]
            for lane, pairs in enumerate(transposed(rows)):
                store(panel, ((part * chunk + step) * lanes + lane, vector), pairs)
