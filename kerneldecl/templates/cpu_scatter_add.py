"""Owns rows added at indices on CPUs: each task owns some rows of the result and looks through all indices.

Knows nothing of how its parameters are chosen, and recognises the sum by its computation, never by its names.

Parameters:
  parallel  True runs tasks on all cores

Returns a custom kernel, a PrimFunc without a trace. Additions to one element have one order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import tvm
from tvm import IRModule, tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script.builder.ir import prim_func

from kerneldecl.analysis.scatter import takes
from kerneldecl.compiler.scatter import ScatterSpec, read_scatter
from kerneldecl.model import Arch, Value
from kerneldecl.templates.cpu.vectors import loop, parallel

TASKS_OF_CORE = 2


def apply(mod: IRModule, params: Mapping[str, Value], arch: Arch) -> IRModule | None:
    """Return the sum as one custom kernel, or None where the function is something else."""
    spec = read_scatter(mod)
    if spec is None or not takes(spec.sizes):
        return None
    return build(spec, min(spec.sizes.rows, arch.the_cpu.cores * TASKS_OF_CORE) if params["parallel"] else 1)


def build(spec: ScatterSpec, tasks: int) -> IRModule:
    """Return a module whose `main` is the kernel; sums of 16-bit elements are kept in float32 until all are added."""
    sizes, columns = spec.sizes, spec.sizes.columns
    share = -(-sizes.rows // tasks)
    with IRBuilder() as builder, prim_func():
        T.func_name("main")
        T.func_attr({"tirx.noalias": True, "global_symbol": "main"})
        given = [T.arg(name, T.Buffer(shape, dtype)) for name, shape, dtype in spec.arguments]
        indices, updates, *base = flat = [T.decl_buffer((math.prod(map(int, arg.shape)),), str(arg.dtype), data=arg.data) for arg in given]
        y = flat[-1]
        is_wide = spec.accum == sizes.dtype
        sums = y if is_wide else T.alloc_buffer((sizes.rows * columns,), spec.accum)
        with parallel(tasks) as task:
            begin = T.bind(task * share)
            end = T.bind(tirx.min(begin + share, T.int64(sizes.rows)))
            count = T.bind(tirx.max(end - begin, T.int64(0)) * columns)
            with loop(count) as at:
                start = base[0][begin * columns + at].astype(spec.accum) if sizes.has_base else tirx.const(0, spec.accum)
                T.buffer_store(sums, start, [begin * columns + at])
            with loop(sizes.updates) as i:
                row = T.bind(indices[i].astype("int64"))
                with T.If(tirx.all(row >= begin, row < end)), T.Then(), loop(columns) as c:
                    T.buffer_store(sums, sums[row * columns + c] + updates[i * columns + c].astype(spec.accum), [row * columns + c])
            if not is_wide:
                with loop(count) as at:
                    T.buffer_store(y, sums[begin * columns + at].astype(sizes.dtype), [begin * columns + at])
    return tvm.IRModule({"main": builder.get()})
