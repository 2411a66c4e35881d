"""Owns the stage that checks the toolchain: what is installed must be what workloads.toml declares.

Knows nothing of what the tools are used for.
"""

from __future__ import annotations

from kerneldecl.errors import ToolchainError
from kerneldecl.planning.plan import EntryPlan
from kerneldecl.stages.session import Session
from kerneldecl.toolchain import cxx, nvcc
from kerneldecl.toolchain.machines import machine_of
from kerneldecl.toolchain.versions import PACKAGES, installed, is_cuda

_INSTEAD = "; `kerneldecl build PATTERNS` builds other entries alone"


def check_toolchain(session: Session) -> None:
    """Refuse to run with other tools than the declared ones: their results would stand under a wrong key."""
    toolchain = session.workspace.inputs.toolchain
    for tool, package in PACKAGES.items():
        declared, found = toolchain[tool], installed(package)
        if declared != found:
            there = f"{package} {found} is installed" if found else f"{package} is not installed"
            sentence = f"workloads.toml asks for {tool} {declared}, but {there}"
            raise ToolchainError(f'{sentence}; run `pip install "{package}=={declared}"` or change [toolchain]')
    for entry in session.entries:
        if entry.is_done:
            continue
        if entry.arch.gpu:
            _check_cuda(entry, toolchain["cuda"])
        else:
            _check_linker(entry)


def _check_linker(entry: EntryPlan) -> None:
    """Raise ToolchainError if nothing here links for the entry's CPU: each candidate would fail of it."""
    try:
        cxx.compiler(machine_of(entry.arch))
    except ToolchainError as error:
        raise ToolchainError(f"{entry.entry}: {error}{_INSTEAD}") from None


def _check_cuda(entry: EntryPlan, declared: str) -> None:
    """Raise ToolchainError if there is no compiler for the entry's GPU, or one of another release than declared."""
    try:
        compiler = nvcc.compiler_for(str(dict(entry.arch.tvm_target)["arch"]))
    except ToolchainError as error:
        raise ToolchainError(f"{entry.entry}: {error}{_INSTEAD}") from None
    if not is_cuda(compiler.version, declared):
        sentence = f"workloads.toml asks for cuda {declared}, but {compiler.path} is of CUDA {compiler.version}"
        raise ToolchainError(f"{entry.entry}: {sentence}; put the other one first on PATH or change [toolchain]{_INSTEAD}")
