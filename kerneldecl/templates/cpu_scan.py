"""Owns cumulative sums on CPUs: one pass over each row, or over neighbouring columns in vectors.

Knows nothing of how its parameters are chosen, and recognises a cumulative sum by its computation, never by its names.

Parameters:
  parallel  True runs tasks, each a row or some neighbouring columns, on all cores

Returns a custom kernel, a PrimFunc without a trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tvm
from tvm import IRModule, tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.long_scan import takes_any
from kerneldecl.compiler.scan import ScanSpec, read_scan
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.vectors import loop, parallel

COLUMNS = 64
"""Neighbouring columns of a task."""


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sum as one custom kernel, or None where the function is none."""
    del arch
    spec = read_scan(mod)
    return None if spec is None or not takes_any(spec.sizes) else build(spec, is_parallel=bool(params["parallel"]))


def build(spec: ScanSpec, *, is_parallel: bool) -> IRModule:
    """Return a module whose `main` is the kernel."""
    sizes = spec.sizes
    block = min(COLUMNS, sizes.inner)
    blocks = -(-sizes.inner // block)
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        given = [T.arg(name, T.Buffer(spec.shape, spec.dtype)) for name in ("X", "Y")]
        x, y = (T.decl_buffer((math.prod(spec.shape),), spec.dtype, data=each.data) for each in given)
        with (parallel if is_parallel else loop)(sizes.outer * blocks) as task:
            outer, first = T.bind(task // blocks), T.bind(task % blocks * block)
            count = T.bind(tirx.min(T.int64(block), sizes.inner - first))
            _columns(spec, (x, y), T.bind(outer * (sizes.extent * sizes.inner) + first), (block, count))
    return tvm.IRModule({"main": builder.get()})


def _columns(spec: ScanSpec, args: tuple[Any, Any], offset: Any, width: tuple[int, Any]) -> None:
    """Add up neighbouring columns, whose first elements are at an offset; `width` is how many there may be and are."""
    x, y = args
    sizes, (block, count) = spec.sizes, width
    sums = T.alloc_buffer((block,), spec.accum)
    with loop(block) as c:
        T.buffer_store(sums, tirx.const(0, spec.accum), [c])
    with loop(sizes.extent) as step:
        place = T.bind(offset + (sizes.extent - 1 - step if spec.is_reverse else step) * sizes.inner)
        with loop(count) as c:
            if spec.is_exclusive:
                T.buffer_store(y, sums[c].astype(spec.dtype), [place + c])
            T.buffer_store(sums, sums[c] + x[place + c].astype(spec.accum), [c])
            if not spec.is_exclusive:
                T.buffer_store(y, sums[c].astype(spec.dtype), [place + c])
