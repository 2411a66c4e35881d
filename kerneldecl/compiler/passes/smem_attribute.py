"""Owns that a kernel with static and dynamic shared memory is launched with the attribute that lets a block have all of it.

Knows nothing of schedules, policies or what a kernel computes.

A block has 48 KB of shared memory, static and dynamic together, unless the launch's function has the attribute for more (CUDA C++
Programming Guide, "Shared Memory" of compute capabilities 7.x and on). TVM 0.27 sets it where the dynamic memory alone is 48 KB or more
(src/runtime/cuda/cuda_module.cc). In between CUDA refuses the launch: CUDA_ERROR_INVALID_VALUE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import tvm
from tvm.ir import Call
from tvm.tirx import AllocBuffer
from tvm_ffi import structural

from kerneldecl.analysis.gpu_limits import launched_smem_bytes
from kerneldecl.compiler.passes.dependent_launch import DYNAMIC_SMEM_TAG
from kerneldecl.model import dtype_bytes

ALIGNMENT = 64
"""Bytes of which TVM's static arrays begin at multiples."""


def static_smem_bytes(device: tvm.IRModule) -> dict[str, int]:
    """Return the static shared memory of a block of each kernel, by its name, in bytes."""
    return {name.name_hint: _static_bytes(func) for name, func in device.functions.items()}


def with_smem_attribute(host: tvm.IRModule, static: Mapping[str, int]) -> tvm.IRModule:
    """Return host functions whose launches request so much dynamic shared memory that TVM sets the attribute wherever it is needed."""

    def launch(call: Any) -> Any:
        if getattr(call.op, "name", "") != "tirx.call_ffi_kernel" or str(call.attrs.launch_params[-1]) != DYNAMIC_SMEM_TAG:
            return call
        *others, dynamic = call.args
        wanted = launched_smem_bytes(static.get(str(call.args[0].value), 0), int(dynamic))
        if wanted == int(dynamic):
            return call
        return Call(call.op, [*others, tvm.tirx.IntImm(str(dynamic.ty.dtype), wanted)], call.attrs, call.ty_args, call.span, call.ty)

    return tvm.IRModule(
        {name: func.with_body(structural.structural_map(func.body, [(Call, launch)])) for name, func in host.functions.items()}
    )


def _static_bytes(func: Any) -> int:
    """Return the bytes of a kernel's static shared memory, each array in whole units of ALIGNMENT."""
    sizes: list[int] = []

    def note(stmt: Any) -> None:
        if stmt.buffer.scope() == "shared":
            size = math.prod(map(int, stmt.buffer.shape)) * dtype_bytes(str(stmt.buffer.dtype))
            sizes.append(-(-size // ALIGNMENT) * ALIGNMENT)

    structural.structural_walk(func.body, [(AllocBuffer, note)])
    return sum(sizes)
