"""Owns how kernels that follow one another overlap: the next one is brought to the multiprocessors while the last one ends.

Knows nothing of schedules, policies or what a kernel computes.

Programmatic dependent launch, of compute capability 9.0 (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization"): a kernel that was launched so may begin once every block of the one before it in its stream has begun and
said so. It waits, before it touches memory, until that one has ended and what it wrote can be seen. What is saved is the time
that a launch takes, about a microsecond; kernels of others, before or after, are not concerned.
"""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm.ir import Call
from tvm.tirx import AttrStmt, Evaluate
from tvm_ffi import structural

from kerneldecl.compiler.passes.l2_prefetch import asks_ahead
from kerneldecl.model import Gpu

FIRST_CAPABILITY = (9, 0)
TAG, DYNAMIC_SMEM_TAG = "tirx.use_programtic_dependent_launch", "tirx.use_dyn_shared_memory"
"""Of TVM's launch parameters; TVM spells it so. The latter must be the last one."""
PARAMS = "tirx.kernel_launch_params"
WAIT = "kd_after_the_last_kernel"
WAIT_SOURCE = f"""
__device__ __forceinline__ void {WAIT}() {{
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}}
"""


def can_overlap(gpu: Gpu) -> bool:
    return gpu.compute_capability >= FIRST_CAPABILITY


def overlapping_kernels(mod: tvm.IRModule, gpu: Gpu) -> tvm.IRModule:
    """Return device functions that wait for the kernel before them, and then let the one after them begin."""
    return tvm.IRModule({name: _waiting(func, gpu) for name, func in mod.functions.items()})


def overlapping_launches(mod: tvm.IRModule, gpu: Gpu) -> tvm.IRModule:
    """Return host functions that launch such kernels.

    Blocks that come early go where there is room first, and would pile up there: a kernel whose blocks find room all at once asks
    for so much shared memory that no multiprocessor holds more of them than its share.
    """

    def launch(call: Any) -> Any:
        if getattr(call.op, "name", "") != "tirx.call_ffi_kernel":
            return call
        names, args = [str(name) for name in call.attrs.launch_params], list(call.args)
        blocks = math.prod(int(extent) for name, extent in zip(names, args[-len(names) :], strict=True) if name.startswith("blockIdx."))
        if names[-1] == DYNAMIC_SMEM_TAG:
            args[-1] = tvm.tirx.IntImm(str(args[-1].ty.dtype), spread_smem_bytes(gpu, blocks, int(args[-1])))
        return _with_params(call, args, _tagged(names))

    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(Call, launch)])) for name, func in mod.functions.items()}
    )


def told_to_overlap(host: tvm.IRModule, device: tvm.IRModule) -> tuple[tvm.IRModule, tvm.IRModule]:
    """Return host and device functions where kernels that wait themselves are launched so.

    TIRx says it in an attribute of the kernel's body, which TVM 0.27 carries through and never reads.
    """
    waiting = {name.name_hint for name, func in device.functions.items() if _says_it_waits(func)}

    def launch(call: Any) -> Any:
        if getattr(call.op, "name", "") != "tirx.call_ffi_kernel" or str(call.args[0].value) not in waiting:
            return call
        return _with_params(call, list(call.args), _tagged(call.attrs.launch_params))

    return (
        tvm.IRModule(
            {name: func.with_body(structural.structural_map(func.body, [(Call, launch)])) for name, func in host.functions.items()}
        ),
        tvm.IRModule(
            {
                name: func.with_attr(PARAMS, _tagged(func.attrs[PARAMS])) if name.name_hint in waiting else func
                for name, func in device.functions.items()
            }
        ),
    )


def _says_it_waits(func: Any) -> bool:
    found: list[Any] = []
    structural.structural_walk(func.body, [(AttrStmt, lambda stmt: found.append(stmt) if stmt.attr_key == TAG else None)])
    return bool(found)


def _with_params(call: Any, args: list[Any], params: list[str]) -> Any:
    attrs = tvm.ir.make_node("tirx.CallFFIKernelAttr", launch_params=params)
    return Call(call.op, args, attrs, call.ty_args, call.span, call.ty)


def spread_smem_bytes(gpu: Gpu, blocks: int, smem_bytes: int) -> int:
    """Return the shared memory with which multiprocessors hold no more blocks than their share; less where not all fit at once."""
    share = -(-blocks // gpu.sm_count)
    least = gpu.smem_per_sm_bytes // (share + 1) - gpu.smem_reserved_per_block_bytes + 1
    fits = share * (max(least, smem_bytes) + gpu.smem_reserved_per_block_bytes) <= gpu.smem_per_sm_bytes
    return max(least, smem_bytes) if fits and least <= gpu.smem_per_block_optin_bytes else smem_bytes


def _waiting(func: Any, gpu: Gpu) -> Any:
    from tvm.script import tirx

    wait = Evaluate(tirx.cuda.func_call(WAIT, source_code=WAIT_SOURCE, return_type="void"))
    return func.with_body(asks_ahead(func, wait, gpu)).with_attr(PARAMS, _tagged(func.attrs[PARAMS]))


def _tagged(params: Any) -> list[str]:
    names = [str(name) for name in params]
    place = len(names) - (names[-1:] == [DYNAMIC_SMEM_TAG])
    return [*names[:place], TAG, *names[place:]]
