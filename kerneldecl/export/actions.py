"""Owns the action that exports a recorded winner: as a CUDA or C++ header, PTX, cubin or SASS.

Knows nothing of records, of the command line or of where the text goes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from kerneldecl.compiler import actions, cpu
from kerneldecl.compiler.cuda import CudaProgram, cuda_program
from kerneldecl.compiler.prim_funcs import calls_vendor_library
from kerneldecl.export.argument import Function, arguments_of
from kerneldecl.export.cpu_header import CpuKernel, cpu_header
from kerneldecl.export.cuda_header import CudaKernel, cuda_header
from kerneldecl.export.host_calls import host_calls
from kerneldecl.model import Arch, Candidate
from kerneldecl.serial import arch_from_json
from kerneldecl.toolchain import nvcc
from kerneldecl.toolchain.machines import machine_of

Json = Mapping[str, Any]


def export(spec: Json, candidate: Json, arch: Json, asked: Json) -> dict[str, str]:
    """Return the text of a candidate in the format that is asked for, or a cubin as base64.

    `asked` has format, name, about (lines of comment), figures (constants by name) and signature (inputs and outputs, each with name,
    shape and dtype).
    Raise ValueError where the candidate cannot be exported, ToolchainError where the format needs nvcc and there is none.
    """
    parsed = arch_from_json(arch)
    scheduled = actions.scheduled_winner(spec, Candidate.from_json(candidate), parsed)
    if calls_vendor_library(scheduled["main"]):
        raise ValueError('it calls a vendor\'s library, which has no source; build it with dispatch = "tuned" to export a kernel')
    if parsed.kind == "cpu":
        return {"text": _on_cpu(scheduled, parsed, asked)}
    program = cuda_program(scheduled, parsed, f"kerneldecl_{asked['name']}")
    if asked["format"] == "cuda":
        return {"text": cuda_header(_kernel(program, asked))}
    return _compiled(program, asked["format"])


def _on_cpu(scheduled: Any, arch: Arch, asked: Json) -> str:
    """Return a C++ header, or the assembly that it holds."""
    symbol = f"kerneldecl_{asked['name']}"
    assembly = cpu.assembly(scheduled, arch, symbol)
    if asked["format"] == "asm":
        return assembly
    return cpu_header(
        CpuKernel(
            function=_function(asked),
            assembly=assembly,
            symbol=symbol,
            processor=str(dict(arch.tvm_target).get("mcpu", "generic")),
            machine=machine_of(arch),
        )
    )


def _function(asked: Json) -> Function:
    return Function(asked["name"], tuple(asked["about"]), asked["figures"], arguments_of(asked["signature"]))


def _kernel(program: CudaProgram, asked: Json) -> CudaKernel:
    function = _function(asked)
    host = host_calls(program.host, [each.name for each in function.arguments])
    return CudaKernel(
        function=function,
        source=program.source,
        arch=program.arch,
        flags=program.flags,
        host=host,
    )


def _compiled(program: CudaProgram, form: str) -> dict[str, str]:
    if form == "ptx":
        return {"text": nvcc.compile_ptx(program.source, program.arch, program.flags)}
    cubin = nvcc.compile_cubin(program.source, program.arch, program.flags).content
    return {"text": nvcc.disassembled(cubin)} if form == "sass" else {"base64": base64.b64encode(cubin).decode()}
