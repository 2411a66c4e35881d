"""Owns functions whose kernels are CUDA text: each kernel calls one function of the text with pointers, its block and its thread.

Knows nothing of what they compute.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tvm
from tvm import tirx
from tvm.script import tirx as T

from kerneldecl.analysis.gpu_limits import WARP_LANES


class CudaKernel(NamedTuple):
    """One kernel: which function of the text it calls, on what, and how it is launched."""

    function: str
    """Takes the buffers as pointers, shared memory where there is some, then the thread block and the thread."""
    buffers: tuple[str, ...]
    """Names of arguments and workspaces."""
    grid: int
    threads: int
    smem: tuple[str, int] = ("uint8", 0)
    """Dtype and elements of the shared memory of a thread block."""
    ctas_per_sm: int = 0
    """Thread blocks for which an SM must have registers; 0 leaves it to ptxas, which spills a few where that makes room for one more."""
    waits: bool = False
    """Whether the function itself waits for the preceding kernel, after what it may do before: prefetches."""


class CudaFunction(NamedTuple):
    """A function of several kernels, one after another."""

    arguments: Sequence[tuple[str, tuple[int, ...], str]]
    """Name, shape and dtype of each."""
    workspaces: Mapping[str, tuple[int, str]]
    """Elements and dtype of each workspace in global memory, by name."""
    text: str
    """CUDA functions, which stand in a namespace of their own."""
    kernels: Sequence[CudaKernel]
    pdl: bool
    """Whether kernels start as the preceding ones end, and wait for them."""


def build(function: CudaFunction) -> tvm.IRModule:
    """Return a module whose `main` is the function."""
    buffers = {name: tirx.decl_buffer(shape, dtype, name) for name, shape, dtype in function.arguments}
    arguments = list(buffers.values())
    workspaces = {name: tirx.decl_buffer((count,), dtype, name) for name, (count, dtype) in function.workspaces.items()}
    kernels = bodies(function, buffers | workspaces)
    allocations = [tirx.AllocBuffer(workspace) for workspace in workspaces.values()]
    body = tirx.SeqStmt([*allocations, *kernels]) if len(kernels) + len(allocations) > 1 else kernels[0]
    func = tirx.PrimFunc(arguments, body).with_attr({"global_symbol": "main", "tirx.noalias": True})
    return tvm.IRModule({"main": func})


def bodies(function: CudaFunction, buffers: Mapping[str, Any]) -> list[Any]:
    """Return the bodies of a function's kernels on these buffers, arguments and workspaces by name."""
    namespace = f"kd_{hashlib.sha256(function.text.encode()).hexdigest()[:12]}"
    # TVM writes the text once for each function that is called, and includes bfloat16 for GPUs that compute with it alone.
    include = "#include <cuda_bf16.h>\n" if "nv_bfloat16" in function.text else ""
    source = f"#ifndef {namespace}_text\n#define {namespace}_text\n{include}namespace {namespace} {{{function.text}}}\n#endif\n"
    return [_body(kernel, buffers, (namespace, source), function.pdl) for kernel in function.kernels]


def _body(kernel: CudaKernel, buffers: Mapping[str, Any], text: tuple[str, str], pdl: bool) -> Any:
    """Return the body of one kernel."""
    namespace, source = text

    @T.prim_func(check_well_formed=False)
    def main() -> None:
        T.device_entry()
        if pdl:
            T.attr({"tirx.use_programtic_dependent_launch": True})
        if kernel.ctas_per_sm > 0:
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": kernel.ctas_per_sm})
        block = T.cta_id([kernel.grid])
        warp = T.warp_id([kernel.threads // WARP_LANES])
        lane = T.lane_id([WARP_LANES])
        pointers = T.meta_var(_pointers(kernel, buffers))
        if pdl and not kernel.waits:
            T.ptx.griddepcontrol.launch_dependents()
            T.ptx.griddepcontrol.wait()
        T.cuda.func_call(f"{namespace}::{kernel.function}", *pointers, block, warp * WARP_LANES + lane, source_code=source)

    return main.body


def _pointers(kernel: CudaKernel, buffers: Mapping[str, Any]) -> list[Any]:
    """Return the buffers' addresses, and that of the shared memory."""
    given = [buffers[name] for name in kernel.buffers]
    flat = [T.decl_buffer((math.prod(map(int, each.shape)),), str(each.dtype), data=each.data) for each in given]
    dtype, count = kernel.smem
    if count:
        pool = T.SMEMPool()
        flat.append(pool.alloc((count,), dtype, align=16))
        pool.commit()
    return [each.ptr_to([0]) for each in flat]
