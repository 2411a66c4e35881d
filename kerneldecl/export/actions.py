"""Owns the action that exports a recorded winner: as a CUDA or C++ header, PTX, cubin or SASS.

Knows nothing of records, of the command line or of where the text goes.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from kerneldecl.compiler import actions
from kerneldecl.compiler.cuda import CudaProgram, cuda_program
from kerneldecl.export.cuda_header import Argument, CudaKernel, cuda_header
from kerneldecl.export.host_calls import host_calls
from kerneldecl.model import Candidate
from kerneldecl.serial import arch_from_json
from kerneldecl.toolchain import nvcc

Json = Mapping[str, Any]
_TAKEN = """
alignas auto bool break case catch char class const default delete do double else enum error explicit export extern false float for friend
goto if inline int long namespace new operator own private protected public register return short signed sizeof static stream struct switch
template this throw true try typedef typename union unsigned using virtual void volatile while workspace
"""
"""Words of C++, and names that the headers' functions use."""


def export(spec: Json, candidate: Json, arch: Json, asked: Json) -> dict[str, str]:
    """Return the text of a candidate in the format that is asked for, or a cubin as base64.

    `asked` has format, name, about (lines of comment), figures (constants by name) and signature (inputs and outputs, each with name,
    shape and dtype).
    Raise ValueError where the candidate cannot be exported, ToolchainError where the format needs nvcc and there is none.
    """
    parsed = arch_from_json(arch)
    scheduled = actions.scheduled_winner(spec, Candidate.from_json(candidate), parsed)
    if parsed.kind == "cpu":
        raise ValueError("not yet")
    program = cuda_program(scheduled, parsed, f"kerneldecl_{asked['name']}")
    if asked["format"] == "cuda":
        return {"text": cuda_header(_kernel(program, asked))}
    return _compiled(program, asked["format"])


def _kernel(program: CudaProgram, asked: Json) -> CudaKernel:
    arguments = arguments_of(asked["signature"])
    host = host_calls(program.host, [each.name for each in arguments])
    return CudaKernel(
        name=asked["name"],
        about=tuple(asked["about"]),
        figures=asked["figures"],
        arguments=arguments,
        source=program.source,
        arch=program.arch,
        flags=program.flags,
        host=host,
    )


def arguments_of(signature: Json) -> tuple[Argument, ...]:
    """Return the arguments of the exported function: inputs, then outputs, by names that C++ allows."""
    listed = [(each, False) for each in signature["inputs"]] + [(each, True) for each in signature["outputs"]]
    return tuple(Argument(_legal(each["name"]), tuple(each["shape"]), each["dtype"], is_output) for each, is_output in listed)


def _legal(name: str) -> str:
    return f"{name}_" if name in _TAKEN.split() else name


def _compiled(program: CudaProgram, form: str) -> dict[str, str]:
    if form == "ptx":
        return {"text": nvcc.compile_ptx(program.source, program.arch, program.flags)}
    cubin = nvcc.compile_cubin(program.source, program.arch, program.flags).content
    return {"text": nvcc.disassembled(cubin)} if form == "sass" else {"base64": base64.b64encode(cubin).decode()}
