"""Owns what tests ask of a template's own candidates beside those of another: all apply, and nvcc spills nothing of the first.

Knows nothing of which template it is.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from kerneldecl.compiler import cuda
from kerneldecl.compiler.iter_space import iter_space
from kerneldecl.model import Arch
from kerneldecl.store.local import LocalStore


def apply_without_spills(mod: Any, template: ModuleType, policy: ModuleType, arch: Arch, top_k: int, folder: Path) -> set[str]:
    """Return the templates that the policy proposes, after a look at this one's candidates."""
    name, proposals = template.__name__.rpartition(".")[2], policy.propose(iter_space(mod), arch, top_k)
    own = [dict(proposal.candidate.params) for proposal in proposals if proposal.candidate.template == name]
    kernels = [template.apply(mod, params, arch) for params in own]
    assert kernels
    assert all(kernels)
    launches = cuda.compile_cuda_object(kernels[0], arch, "kernel", LocalStore(folder)).launches
    assert not any(launch.usage.spill_bytes + launch.usage.stack_bytes for launch in launches)
    return {proposal.candidate.template for proposal in proposals}
