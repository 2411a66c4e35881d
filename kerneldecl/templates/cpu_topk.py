"""Owns the first elements of rows in their order on CPUs: topk and sort.

Knows nothing of how its parameters are chosen, and recognises sorted rows by their computation, never by their names.

Parameters:
  form      insert  few results are kept in order while a row is read
            count   an element's place is the number of those before it: all are compared, a vector at a time
            select  what a bound excludes is left out, the rest is sorted by radix
            radix   digits of 8 bits, the lowest first, each by counting
            merge   neighbouring runs, of twice the length each time
  parallel  True runs rows on all cores

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import tvm
from tvm import IRModule, tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_row_sort import CpuTopParams
from kerneldecl.compiler.row_sort import TopSpec, order_key, read_top
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.row_sorts import SortArgs, counted, radix_sorted, selected, store
from kerneldecl.templates.cpu.vectors import loop, parallel


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sorted rows as one custom kernel, or None where the function is something else."""
    spec, sorting = read_top(mod), CpuTopParams(**params)  # type: ignore[arg-type]
    if spec is None or not sorting.fits(spec.sizes):
        return None
    return build(spec, sorting, lanes=arch.the_cpu.vector_bytes // 4)


def build(spec: TopSpec, params: CpuTopParams, *, lanes: int) -> IRModule:
    """Return a module whose `main` is the kernel; `lanes` are elements of 32 bits in a vector."""
    forms: dict[str, Callable[[TopSpec, SortArgs, Any], None]] = {
        "insert": _insert,
        "select": lambda *given: selected(*given, lanes=lanes),
        "count": lambda *given: counted(*given, lanes=lanes),
        "radix": radix_sorted,
        "merge": _merge,
    }
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        given = [T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in spec.arguments]
        args = SortArgs(*(T.decl_buffer((math.prod(map(int, arg.shape)),), str(arg.dtype), data=arg.data) for arg in given))
        with (parallel if params.parallel else loop)(spec.sizes.rows) as row:
            forms[params.form](spec, args, row)
    return tvm.IRModule({"main": builder.get()})


def _insert(spec: TopSpec, args: SortArgs, row: Any) -> None:
    """Keep the first elements so far in order, by key and place."""
    first, count = T.bind(row * spec.shape[-1]), spec.count
    keys, places = T.alloc_buffer((count,), "int64"), T.alloc_buffer((count,), "int32")
    to, held = T.alloc_buffer((1,), "int64"), T.alloc_buffer((1,), "int64")
    with loop(spec.shape[-1]) as at:
        # In a variable: what T.bind holds is lost where TVM 0.27 converts bfloat16.
        T.buffer_store(held, order_key(spec, args.x[first + at]), [0])
        key = held[0]
        with T.If(tirx.any(at < count, key < keys[count - 1])), T.Then():
            T.buffer_store(to, tirx.min(at, T.int64(count - 1)), [0])
            with T.While(tirx.all(to[0] > 0, key < keys[tirx.max(to[0] - 1, T.int64(0))])):
                T.buffer_store(keys, keys[to[0] - 1], [to[0]])
                T.buffer_store(places, places[to[0] - 1], [to[0]])
                T.buffer_store(to, to[0] - 1, [0])
            T.buffer_store(keys, key, [to[0]])
            T.buffer_store(places, at.astype("int32"), [to[0]])
    with loop(count) as at:
        store(spec, args, row, at, places[at])


def _merge(spec: TopSpec, args: SortArgs, row: Any) -> None:
    """Sort a row's keys by merging runs of twice the length each time; of equal ones, those of the first run come first."""
    extent = spec.shape[-1]
    first = T.bind(row * extent)
    turns = max(0, (extent - 1).bit_length())
    keys, places = T.alloc_buffer((2 * extent,), "int64"), T.alloc_buffer((2 * extent,), "int32")
    with loop(extent) as at:
        T.buffer_store(keys, order_key(spec, args.x[first + at]), [at])
        T.buffer_store(places, at.astype("int32"), [at])
    for turn in range(turns):
        _merge_runs(extent, keys, places, turn)
    with loop(spec.count) as at:
        store(spec, args, row, at, places[turns % 2 * extent + at])


def _merge_runs(extent: int, keys: Any, places: Any, turn: int) -> None:
    """Merge neighbouring runs of 2^turn keys, with their places, from one half of the buffers to the other."""
    length = 1 << turn
    source, target = turn % 2 * extent, (turn + 1) % 2 * extent
    ends = T.alloc_buffer((2,), "int64")
    with loop(-(-extent // (2 * length))) as pair:
        begin = T.bind(pair * (2 * length))
        middle = T.bind(tirx.min(begin + length, T.int64(extent)))
        end = T.bind(tirx.min(begin + 2 * length, T.int64(extent)))
        T.buffer_store(ends, begin, [0])
        T.buffer_store(ends, middle, [1])
        with loop(end - begin) as at:
            one, other = T.bind(source + tirx.min(ends[0], middle - 1)), T.bind(source + tirx.min(ends[1], end - 1))
            is_other = T.bind(tirx.any(ends[0] >= middle, tirx.all(ends[1] < end, keys[other] < keys[one])))
            place = T.bind(tirx.Select(is_other, other, one))
            T.buffer_store(keys, keys[place], [target + begin + at])
            T.buffer_store(places, places[place], [target + begin + at])
            T.buffer_store(ends, ends[0] + tirx.Select(is_other, T.int64(0), T.int64(1)), [0])
            T.buffer_store(ends, ends[1] + tirx.Select(is_other, T.int64(1), T.int64(0)), [1])
