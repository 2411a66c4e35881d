"""Declarations in the place of CUDA's headers: the first frozen schedule of each template gives the same cubin with both."""

from __future__ import annotations

import re
from typing import NamedTuple

import pytest
import tvm
from support.compilers import needs_nvcc

from kerneldecl.compiler.cpu import apply_candidate
from kerneldecl.compiler.cuda import CudaProgram, cuda_program
from kerneldecl.compiler.cuda_headers import headers_for
from kerneldecl.model import Candidate
from kerneldecl.toolchain import nvcc
from replay import frozen, project
from replay.replay import SCHEDULES
from replay.workloads import read_workloads

ARCHS = ("h200", "a100-80gb", "rtx-4090")
DIGEST = re.compile(r"[0-9a-f]{16}")
"""Outcome of a candidate that applies."""


class Schedule(NamedTuple):
    """A frozen schedule."""

    arch: str
    workload: str
    candidate: str


def schedules() -> dict[str, list[Schedule]]:
    """Return the schedules of each template, on the first arch that has any."""
    known, found = [each.text for each in read_workloads()], dict[str, list[Schedule]]()
    for arch in ARCHS:
        lists, here = frozen.read_lists("schedules", arch), dict[str, list[Schedule]]()
        for workload in known:
            for line in lists.get((workload, SCHEDULES), ()):
                if DIGEST.match(line.outcome):
                    here.setdefault(line.candidate.split()[0], []).append(Schedule(arch, workload, line.candidate))
        found = {**here, **found}
    return found


def program_of(schedule: Schedule) -> CudaProgram | None:
    """Return what nvcc gets of a schedule; None where TVM makes no code of it."""
    workload = next(each for each in read_workloads() if each.text == schedule.workload)
    template, params = frozen.read_names().candidate_of(schedule.candidate)
    arch = project.arch_named(schedule.arch)
    applied = apply_candidate(project.STANDARD, project.lowered(workload.rule, workload.attrs), Candidate.of(template, params), arch)
    assert applied is not None
    try:
        return cuda_program(applied.mod, arch, "kernel")
    except tvm.error.InternalError:
        return None


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("template", schedules())
def test_declarations_give_the_cubin_that_headers_give(template: str) -> None:
    program = next(filter(None, map(program_of, schedules()[template])))
    headers = headers_for(program.arch, program.flags)
    assert headers is not None
    assert nvcc.shortened(program.source, headers) is not None
    with_declarations = nvcc.compile_cubin(program.source, program.arch, program.flags, headers)
    assert with_declarations == nvcc.compile_cubin(program.source, program.arch, program.flags)
