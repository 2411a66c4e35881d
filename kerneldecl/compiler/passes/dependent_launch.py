"""Owns programmatic dependent launch (PDL): a kernel's blocks are launched while the preceding kernel of the stream ends.

Knows nothing of schedules, policies or what a kernel computes.

PDL needs compute capability 9.0 (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"). A kernel
with the launch attribute may begin once every block of the preceding kernel has executed griddepcontrol.launch_dependents.
Before it touches memory it executes griddepcontrol.wait, which returns when the preceding kernel has ended and its writes are
visible. PDL hides the launch latency, about a microsecond. Behind a kernel that never executes launch_dependents it costs 0.3 us in a
CUDA graph, where artifact/graph_starts.py takes it back, and nothing elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tvm
from tvm.ir import Call
from tvm.tirx import AttrStmt, Evaluate
from tvm_ffi import structural

from kerneldecl.compiler.passes.l2_prefetch import prefetch_before_wait
from kerneldecl.model import Gpu

FIRST_CAPABILITY = (9, 0)
TAG, DYNAMIC_SMEM_TAG = "tirx.use_programtic_dependent_launch", "tirx.use_dyn_shared_memory"
"""Two of TVM's launch parameters, in TVM's spelling. The latter must be the last one."""
PARAMS = "tirx.kernel_launch_params"
WAIT = "kd_after_the_last_kernel"
WAIT_SOURCE = f"""
__device__ __forceinline__ void {WAIT}() {{
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}}
"""


def supports_pdl(gpu: Gpu) -> bool:
    return gpu.compute_capability >= FIRST_CAPABILITY


def pdl_kernels(mod: tvm.IRModule, gpu: Gpu) -> tvm.IRModule:
    """Return device functions that wait for the preceding kernel, and then allow the next one to be launched."""
    return tvm.IRModule({name: _with_wait(func, gpu) for name, func in mod.functions.items()})


def pdl_launches(mod: tvm.IRModule, gpu: Gpu, static: Mapping[str, int]) -> tvm.IRModule:
    """Return host functions that launch their kernels with PDL; `static` is the static shared memory of each kernel's block.

    Blocks that are launched early go to the SMs that have room first, and would pile up there. So a kernel whose blocks are all
    resident at once requests enough shared memory that no SM holds more of them than an even distribution gives it.
    """

    def launch(call: Any) -> Any:
        if getattr(call.op, "name", "") != "tirx.call_ffi_kernel":
            return call
        names, args = [str(name) for name in call.attrs.launch_params], list(call.args)
        grid = [extent for name, extent in zip(names, args[-len(names) :], strict=True) if name.startswith("blockIdx.")]
        # Of rows that are known at run time nobody knows the blocks.
        if names[-1] == DYNAMIC_SMEM_TAG and all(isinstance(extent, tvm.tirx.IntImm) for extent in grid):
            blocks, fixed = math.prod(map(int, grid)), static.get(str(args[0].value), 0)
            args[-1] = tvm.tirx.IntImm(str(args[-1].ty.dtype), balanced_smem_bytes(gpu, blocks, fixed + int(args[-1])) - fixed)
        return _with_params(call, args, _tagged(names))

    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(Call, launch)])) for name, func in mod.functions.items()}
    )


def with_declared_pdl(host: tvm.IRModule, device: tvm.IRModule) -> tuple[tvm.IRModule, tvm.IRModule]:
    """Return host and device functions in which kernels that declare PDL themselves are launched with it.

    TIRx declares it by an attribute of the kernel's body, which TVM 0.27 carries through and never reads.
    """
    with_pdl = {name.name_hint for name, func in device.functions.items() if _declares_pdl(func)}

    def launch(call: Any) -> Any:
        if getattr(call.op, "name", "") != "tirx.call_ffi_kernel" or str(call.args[0].value) not in with_pdl:
            return call
        return _with_params(call, list(call.args), _tagged(call.attrs.launch_params))

    return (
        tvm.IRModule(
            {name: func.with_body(structural.structural_map(func.body, [(Call, launch)])) for name, func in host.functions.items()}
        ),
        tvm.IRModule(
            {
                name: func.with_attr(PARAMS, _tagged(func.attrs[PARAMS])) if name.name_hint in with_pdl else func
                for name, func in device.functions.items()
            }
        ),
    )


def _declares_pdl(func: Any) -> bool:
    found: list[Any] = []
    structural.structural_walk(func.body, [(AttrStmt, lambda stmt: found.append(stmt) if stmt.attr_key == TAG else None)])
    return bool(found)


def _with_params(call: Any, args: list[Any], params: list[str]) -> Any:
    attrs = tvm.ir.make_node("tirx.CallFFIKernelAttr", launch_params=params)
    return Call(call.op, args, attrs, call.ty_args, call.span, call.ty)


def balanced_smem_bytes(gpu: Gpu, blocks: int, smem_bytes: int) -> int:
    """Return the shared memory per block that spreads blocks evenly over SMs; `smem_bytes` where not all blocks are resident at once."""
    blocks_per_sm = -(-blocks // gpu.sm_count)
    least = gpu.smem_per_sm_bytes // (blocks_per_sm + 1) - gpu.smem_reserved_per_block_bytes + 1
    fits = blocks_per_sm * (max(least, smem_bytes) + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
    return max(least, smem_bytes) if fits and least <= gpu.smem_per_block_optin_bytes else smem_bytes


def _with_wait(func: Any, gpu: Gpu) -> Any:
    from tvm.script import tirx

    wait = Evaluate(tirx.cuda.func_call(WAIT, source_code=WAIT_SOURCE, return_type="void"))
    return func.with_body(prefetch_before_wait(func, wait, gpu)).with_attr(PARAMS, _tagged(func.attrs[PARAMS]))


def _tagged(params: Any) -> list[str]:
    names = [str(name) for name in params]
    place = len(names) - (names[-1:] == [DYNAMIC_SMEM_TAG])
    return [*names[:place], TAG, *names[place:]]
