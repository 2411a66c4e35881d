"""Owns the kernel of attention on CPUs: its arguments, its tasks, and the blocks of keys that each goes through.

Knows nothing of how its parameters are chosen.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.cpu_params import CpuAttentionParams
from kerneldecl.compiler.attention import AttentionSpec
from kerneldecl.templates.cpu.attention_block import add_block, clear
from kerneldecl.templates.cpu.attention_config import AttentionKernel, Element, Place, Task
from kerneldecl.templates.cpu.attention_rows import load_columns, store_results
from kerneldecl.templates.cpu.vectors import in_float32, load, loop, parallel, store

ROWS_TOGETHER = 64
"""Rows of keys and values that one task packs."""


def build(spec: AttentionSpec, params: CpuAttentionParams, lanes: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, with vectors of so many float32."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = {name: T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in _arguments(spec)}
        kernel = AttentionKernel(spec, params, lanes, args)
        if True:
            keys, values = _packed(kernel) if params.pack else (_element(kernel, "K"), _element(kernel, "V"))
            with parallel(kernel.tasks) as task:
                _task(kernel, _place(kernel, task), keys, values)
    return tvm.IRModule({"main": builder.get()})


def _arguments(spec: AttentionSpec) -> list[tuple[str, tuple[int, ...], str]]:
    queries, results = (spec.shape(spec.heads, spec.queries, columns) for columns in (spec.head_dim, spec.value_dim))
    keys, values = (spec.shape(spec.kv_heads, spec.keys, columns) for columns in (spec.head_dim, spec.value_dim))
    shapes = {"Q": queries, "K": keys, "V": values} | ({"mask": (spec.queries, spec.keys)} if spec.has_mask else {}) | {"O": results}
    return [(name, shape, spec.dtype) for name, shape in shapes.items()]


def _element(kernel: AttentionKernel, name: str) -> Element:
    """Return what gives an element of an argument."""
    arg, spec = kernel.args[name], kernel.spec
    return lambda place, row, column: in_float32(arg[spec.index(place.batch, place.kv_head, row, column)])


def _packed(kernel: AttentionKernel) -> tuple[Element, Element]:
    """Copy keys and values to float32, head by head, and return what gives an element of the copies."""
    spec = kernel.spec
    columns = (spec.head_dim, spec.value_dim)
    keys, values = (T.alloc_buffer((spec.batch, spec.kv_heads, spec.keys, count), "float32") for count in columns)
    chunks = -(-spec.keys // ROWS_TOGETHER)
    with parallel(spec.batch * spec.kv_heads * chunks) as task:
        head, first = T.bind(task // chunks), T.bind(task % chunks * ROWS_TOGETHER)
        with loop(tirx.min(T.int64(ROWS_TOGETHER), spec.keys - first)) as row:
            for name, copy in (("K", keys), ("V", values)):
                _pack_row(kernel, name, copy, (head // spec.kv_heads, head % spec.kv_heads, first + row))

    def element(copy: Any) -> Element:
        return lambda place, row, column: copy[place.batch, place.kv_head, row, column]

    return element(keys), element(values)


def _pack_row(kernel: AttentionKernel, name: str, copy: Any, at: tuple[Any, Any, Any]) -> None:
    source, lanes, columns = kernel.args[name], kernel.lanes, int(copy.shape[-1])
    with loop(columns // lanes) as part:
        store(copy, (*at, part * lanes), load(source, kernel.spec.index(*at, part * lanes), lanes))
    with loop(columns % lanes) as rest:
        column = columns // lanes * lanes + rest
        T.buffer_store(copy, in_float32(source[kernel.spec.index(*at, column)]), [*at, column])


def _place(kernel: AttentionKernel, task: Any) -> Place:
    """Return a task's place. With a causal mask long and short blocks alternate, so that each thread's share is worth about as much."""
    spec, block = kernel.spec, task % kernel.blocks
    if spec.is_causal:
        block = tirx.Select(block % 2 == 0, block // 2, kernel.blocks - 1 - block // 2)
    head = T.bind(task // kernel.blocks % spec.heads)
    return Place(T.bind(task // (kernel.blocks * spec.heads)), head, T.bind(head // spec.group), T.bind(block * kernel.params.block_m))


def _task(kernel: AttentionKernel, place: Place, keys: Element, values: Element) -> None:
    """Compute the results of one block of queries."""
    spec, params = kernel.spec, kernel.params

    def buffer(*rows: int) -> Any:
        return T.alloc_buffer((*rows, params.block_m), "float32")

    if True:
        bias = buffer(params.block_n) if spec.has_mask else None
        columns = (buffer(spec.head_dim), buffer(params.block_n), bias, buffer(spec.value_dim))
        task = Task(kernel, place, keys, values, *columns, *(buffer() for _ in range(4)))
        load_columns(task, kernel.args["Q"], lambda row, at: spec.index(place.batch, place.head, row, at), task.queries, spec.head_dim, spec.scale)
        clear(task)
        end = T.bind(_end(kernel, place))
        with loop((end + params.block_n - 1) // params.block_n) as block:
            first = T.bind(block * params.block_n)
            count = T.bind(tirx.min(T.int64(params.block_n), end - first))
            if task.bias is not None:
                load_columns(task, kernel.args["mask"], lambda row, at: (row, first + at), task.bias, count)
            add_block(task, first, count)
        store_results(task)


def _end(kernel: AttentionKernel, place: Place) -> Any:
    """Return the key behind the last one that a block's queries see."""
    spec = kernel.spec
    if not spec.is_causal:
        return T.int64(spec.keys)
    seen = place.row + kernel.params.block_m + spec.diagonal
    return tirx.max(T.int64(0), tirx.min(T.int64(spec.keys), seen))
