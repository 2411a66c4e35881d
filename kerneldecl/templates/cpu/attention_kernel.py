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
from kerneldecl.templates.cpu.vectors import has_vectors, in_float32, load, loop, parallel, spread, store

ROWS_TOGETHER = 64
"""Rows of keys and values that one task packs."""


def build(spec: AttentionSpec, params: CpuAttentionParams, lanes: int) -> tvm.IRModule:
    """Return a module whose `main` is the kernel, with vectors of so many float32."""
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        args = {name: T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in spec.arguments}
        kernel = AttentionKernel(spec, params, lanes, args)
        keys, values = _packed(kernel) if params.pack else (_element(kernel, "K"), _element(kernel, "V"))
        with parallel(kernel.tasks) as task:
            _task(kernel, _place(kernel, task), keys, values)
    return tvm.IRModule({"main": builder.get()})


def _element(kernel: AttentionKernel, name: str) -> Element:
    """Return what gives an element of keys or values as the arguments hold them."""

    def element(place: Place, row: Any, column: Any) -> Any:
        arg, index = kernel.operand(name, place.batch, place.kv_head, row, column)
        return in_float32(arg[index])

    return element


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
    lanes, columns = kernel.lanes, int(copy.shape[-1])
    whole = columns // lanes if has_vectors(kernel.spec.dtype) else 0
    if whole:
        with loop(whole) as part:
            source, index = kernel.operand(name, *at, part * lanes)
            store(copy, (*at, part * lanes), load(source, index, lanes))
    with loop(columns - whole * lanes) as rest:
        source, index = kernel.operand(name, *at, whole * lanes + rest)
        T.buffer_store(copy, in_float32(source[index]), [*at, whole * lanes + rest])


def _place(kernel: AttentionKernel, task: Any) -> Place:
    """Return a task's place.

    Where queries see different numbers of keys, blocks of many and of few alternate: each thread gets neighbouring tasks, which are then
    worth about as much as another's.
    """
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

    bias = buffer(params.block_n) if kernel.has_bias_columns else None
    columns = (buffer(spec.head_dim), buffer(params.block_n), bias, buffer(spec.value_dim))
    task = Task(kernel, place, keys, values, *columns, *(buffer() for _ in range(4)))
    _load_queries(task)
    clear(task)
    begin, end = map(T.bind, _seen(kernel, place))
    with loop((end - begin + params.block_n - 1) // params.block_n) as block:
        first = T.bind(begin + block * params.block_n)
        count = T.bind(tirx.min(T.int64(params.block_n), end - first))
        if bias is not None:
            load_columns(
                task, kernel.args["mask"], lambda row, at: kernel.mask_index(place, row, first + at), bias, count, lambda each: each
            )
        add_block(task, first, count)
    store_results(task)


def _mask_index(kernel: AttentionKernel, place: Place, first: Any, row: Any, column: Any) -> tuple[Any, ...]:
    return kernel.mask_index(place, row, first + column)


def _load_queries(task: Task) -> None:
    """Load a block of queries, scaled."""
    kernel, place, args = task.kernel, task.place, task.kernel.args
    factor = T.float32(kernel.spec.scale)
    if "q_scale" in args:
        factor = factor * (args["q_scale"][0] * args["k_scale"][0])

    def scaled(value: Any) -> Any:
        lanes = value.ty.dtype.lanes
        return value * (spread(factor, lanes) if lanes > 1 else factor)

    source, _ = kernel.operand("Q", 0, 0, 0, 0)
    index = lambda row, column: kernel.operand("Q", place.batch, place.head, row, column)[1]  # noqa: E731
    load_columns(task, source, index, task.queries, T.int64(kernel.spec.head_dim), scaled)


def _seen(kernel: AttentionKernel, place: Place) -> tuple[Any, Any]:
    """Return the first key that a block's queries see, and the one behind the last."""
    lower, upper = kernel.spec.band
    begin, end = T.int64(0), T.int64(kernel.spec.keys)
    if upper is not None:
        end = tirx.max(T.int64(0), tirx.min(end, place.row + kernel.params.block_m + upper))
    if lower is not None:
        begin = tirx.min(end, tirx.max(begin, place.row + lower))
    return begin, end
