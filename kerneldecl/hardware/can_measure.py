"""Owns the question whether this machine can measure for an arch.

Knows nothing of what is measured. A GPU must have the arch's model; a CPU must be the arch's kind of machine, have the arch's model,
if the arch names one, and vectors that are wide enough.
"""

from __future__ import annotations

from kerneldecl.hardware import gpu_lock, host
from kerneldecl.model import Arch
from kerneldecl.toolchain.machines import here as this_machine
from kerneldecl.toolchain.machines import machine_of


def why_not_measured_here(arch: Arch) -> str:
    """Return why this machine cannot measure for an arch, as a sentence; empty if it can."""
    if arch.gpu:
        return gpu_lock.why_not_here(arch.model)
    if machine_of(arch) != this_machine():
        return f"it must be measured on {machine_of(arch)}; this machine is {this_machine()}"
    here = host.detect()
    if arch.model and arch.model != here.model:
        return f"it must be measured on {arch.model}; this is {here.model}"
    if arch.cpu and arch.cpu.vector_bytes > here.the_cpu.vector_bytes:
        return f"arch {arch.name} has vectors of {arch.cpu.vector_bytes} bytes; this machine's have {here.the_cpu.vector_bytes}"
    return ""
