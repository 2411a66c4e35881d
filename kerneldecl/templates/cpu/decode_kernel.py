"""Owns the kernel of attention against a KV cache on CPUs: all scores of some rows of queries, their powers, then weighted values.

Knows nothing of how its parameters are chosen or of how a function is recognised.

A task has rows of queries that see the same head of keys, so that keys and values are read once for all of them. Elements of keys lie in
vectors, as they are stored; a score is a vector of partial sums until it is whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import CpuDecodeParams
from kerneldecl.compiler.attention_decode import DecodeSpec
from kerneldecl.templates.cpu.quantized_kernel import summed
from kerneldecl.templates.cpu.vectors import kept, larger, load, loop, parallel, power, spread, store, variable

BLOCK_KEYS = 128
"""Keys whose values stay in the L1 or L2 cache while all rows of a task weight them."""
ACCUMULATORS = 16
"""Vectors of a register tile of values at most."""
LOWEST_FLOAT = -3.4028234663852886e38
"""Highest score of a row that sees no key: its powers are zero."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, while it is written."""

    spec: DecodeSpec
    params: CpuDecodeParams
    lanes: int
    args: Mapping[str, Any]

    @property
    def rows(self) -> int:
        """Return the rows of queries of a task."""
        return math.gcd(self.params.rows, self.spec.group * self.spec.queries)

    @property
    def tile_m(self) -> int:
        return math.gcd(self.params.tile_m, self.rows)

    @property
    def padded(self) -> int:
        """Return the scores of a row, so that the last tile of keys and the last vector are whole."""
        return -(-self.spec.keys // self.lanes) * self.lanes + self.params.tile_n

    @property
    def vectors(self) -> int:
        """Return the vectors of a row of values in a register tile."""
        most = ACCUMULATORS // self.tile_m
        return max(each for each in range(1, most + 1) if self.spec.value_dim // self.lanes % each == 0)


class Task(NamedTuple):
    """A sequence's rows of queries of one head of keys."""

    batch: Any
    kv_head: Any
    first: Any
    """The first row among those of the head of keys."""
    length: Any
    """Keys of the sequence."""
    queries: Any
    scores: Any
    """Scores, then powers: [rows, padded]."""
    total: Any
    """Sums of powers."""
    results: Any


def build(spec: DecodeSpec, params: CpuDecodeParams, lanes: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, with vectors of so many float32, which divide rows of keys and of values."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = {name: T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in spec.arguments}
        kernel = Kernel(spec, params, lanes, args)
        parts = spec.group * spec.queries // kernel.rows
        with parallel(spec.batch * spec.kv_heads * parts) as number:
            batch = T.bind(number // (parts * spec.kv_heads))
            length = tirx.Cast("int64", args["lengths"][batch])
            task = Task(
                batch=batch,
                kv_head=T.bind(number // parts % spec.kv_heads),
                first=T.bind(number % parts * kernel.rows),
                length=T.bind(tirx.max(tirx.min(length, T.int64(spec.keys)), T.int64(0))),
                queries=T.alloc_buffer((kernel.rows, spec.head_dim), "float32"),
                scores=T.alloc_buffer((kernel.rows, kernel.padded), "float32"),
                total=T.alloc_buffer((kernel.rows,), "float32"),
                results=T.alloc_buffer((kernel.rows, spec.value_dim), "float32"),
            )
            _load_queries(kernel, task)
            _score(kernel, task)
            _raise(kernel, task)
            _weight(kernel, task)
            _store(kernel, task)
    return tvm.IRModule({"main": builder.get()})


def _place(kernel: Kernel, task: Task, row: Any) -> tuple[Any, Any]:
    """Return the head and the query of a row of a task."""
    at = T.bind(task.first + row)
    return task.kv_head * kernel.spec.group + at // kernel.spec.queries, at % kernel.spec.queries


def _cached(kernel: Kernel, task: Task, key: Any) -> tuple[Any, Any]:
    """Return the sequence or page, and the row, of a key."""
    spec = kernel.spec
    if not spec.page_size:
        return task.batch, key
    return tirx.Cast("int64", kernel.args["page_table"][task.batch, key // spec.page_size]), key % spec.page_size


def _load_queries(kernel: Kernel, task: Task) -> None:
    """Copy queries to float32, multiplied by the scale."""
    spec, lanes = kernel.spec, kernel.lanes
    with loop(kernel.rows) as row:
        head, query = _place(kernel, task, row)
        with loop(spec.head_dim // lanes) as part:
            vector = load(kernel.args["Q"], spec.index(task.batch, head, query, part * lanes), lanes)
            store(task.queries, (row, part * lanes), vector * spread(spec.scale, lanes))


def _score(kernel: Kernel, task: Task) -> None:
    """Multiply queries by keys, in register tiles of both."""
    spec, lanes, tile_m, tile_n = kernel.spec, kernel.lanes, kernel.tile_m, kernel.params.tile_n
    with loop((task.length + tile_n - 1) // tile_n) as tile:
        places = []
        for number in range(tile_n):
            outer, row = _cached(kernel, task, tirx.min(tile * tile_n + number, task.length - 1))
            places.append((T.bind(outer), T.bind(row)))
        with loop(kernel.rows // tile_m) as strip:
            sums = [[_zeros(lanes) for _ in range(tile_m)] for _ in places]
            with loop(spec.head_dim // lanes) as part:
                queries = [kept(load(task.queries, (strip * tile_m + row, part * lanes), lanes)) for row in range(tile_m)]
                for (outer, row), several in zip(places, sums, strict=True):
                    keys = kept(load(kernel.args["K"], spec.index(outer, task.kv_head, row, part * lanes), lanes))
                    for total, query in zip(several, queries, strict=True):
                        store(total, (0,), load(total, (0,), lanes) + keys * query)
            for number, several in enumerate(sums):
                for row, total in enumerate(several):
                    T.buffer_store(task.scores, summed(total, lanes), [strip * tile_m + row, tile * tile_n + number])


def _raise(kernel: Kernel, task: Task) -> None:
    """Make scores powers relative to the highest of their row; those of keys that a row does not see are zero."""
    spec, lanes = kernel.spec, kernel.lanes
    count = T.bind((task.length + lanes - 1) // lanes)
    with loop(kernel.rows) as row:
        _, query = _place(kernel, task, row)
        seen = T.bind(tirx.max(task.length - spec.queries + 1 + query, T.int64(0)))
        with loop(count * lanes - seen) as rest:
            T.buffer_store(task.scores, T.float32(-math.inf), [row, seen + rest])
        highest, total = variable(lanes), _zeros(lanes)
        store(highest, (0,), spread(LOWEST_FLOAT, lanes))
        with loop(count) as part:
            store(highest, (0,), larger(load(highest, (0,), lanes), load(task.scores, (row, part * lanes), lanes)))
        top = kept(spread(_highest(highest, lanes), lanes))
        with loop(count) as part:
            powers = power(load(task.scores, (row, part * lanes), lanes) - top)
            store(task.scores, (row, part * lanes), powers)
            store(total, (0,), load(total, (0,), lanes) + powers)
        T.buffer_store(task.total, summed(total, lanes), [row])


def _weight(kernel: Kernel, task: Task) -> None:
    """Add up values, each times its key's power, a block of keys after the other."""
    spec, lanes, tile_m, vectors = kernel.spec, kernel.lanes, kernel.tile_m, kernel.vectors
    values = kernel.args.get("V", kernel.args["K"])
    with loop(kernel.rows) as row, loop(spec.value_dim // lanes) as part:
        store(task.results, (row, part * lanes), spread(0.0, lanes))
    with (
        loop((task.length + BLOCK_KEYS - 1) // BLOCK_KEYS) as block,
        loop(kernel.rows // tile_m) as strip,
        loop(spec.value_dim // (vectors * lanes)) as part,
    ):
        columns = [part * vectors * lanes + vector * lanes for vector in range(vectors)]
        sums = [[variable(lanes) for _ in columns] for _ in range(tile_m)]
        for row, several in enumerate(sums):
            for total, column in zip(several, columns, strict=True):
                store(total, (0,), load(task.results, (strip * tile_m + row, column), lanes))
        with loop(tirx.min(T.int64(BLOCK_KEYS), task.length - block * BLOCK_KEYS)) as number:
            key = T.bind(block * BLOCK_KEYS + number)
            outer, place = (T.bind(each) for each in _cached(kernel, task, key))
            powers = [kept(spread(task.scores[strip * tile_m + row, key], lanes)) for row in range(tile_m)]
            for at, column in enumerate(columns):
                vector = kept(load(values, spec.index(outer, task.kv_head, place, column), lanes))
                for several, factor in zip(sums, powers, strict=True):
                    store(several[at], (0,), load(several[at], (0,), lanes) + vector * factor)
        for row, several in enumerate(sums):
            for total, column in zip(several, columns, strict=True):
                store(task.results, (strip * tile_m + row, column), load(total, (0,), lanes))


def _store(kernel: Kernel, task: Task) -> None:
    """Divide results by the sums of powers; a row without a power gives zeros."""
    spec, lanes = kernel.spec, kernel.lanes
    with loop(kernel.rows) as row:
        head, query = _place(kernel, task, row)
        total = kept(spread(task.total[row], lanes))
        with loop(spec.value_dim // lanes) as part:
            quotient = load(task.results, (row, part * lanes), lanes) / total
            zero = spread(0.0, lanes)
            index = spec.index(task.batch, head, query, part * lanes)
            store(kernel.args["O"], index, tirx.Select(tirx.EQ(total, zero), zero, quotient))


def _zeros(lanes: int) -> Any:
    total = variable(lanes)
    store(total, (0,), spread(0.0, lanes))
    return total


def _highest(vector: Any, lanes: int) -> Any:
    """Return the largest element of a vector."""
    while lanes > 2:
        lanes //= 2
        store(vector, (0,), larger(load(vector, (0,), lanes), load(vector, (lanes,), lanes)))
    return tirx.max(vector[0], vector[1])
