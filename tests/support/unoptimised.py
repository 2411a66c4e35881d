"""Owns the target of tests that ask what a kernel computes: LLVM takes longer to optimise small kernels than they run.

Knows nothing of kernels. Builds have every candidate's optimised code verified, and so have the tests of builds.
"""

from __future__ import annotations

from typing import Any

import tvm

from kerneldecl.compiler.cpu import target_of
from kerneldecl.model import Arch


def unoptimised(arch: Arch) -> Any:
    """Return a CPU's target, with the vectors it has, whose code is not optimised."""
    return tvm.target.Target({**dict(target_of(arch).export()), "opt-level": 0})
