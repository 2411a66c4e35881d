"""kerneldecl.torch: torch modules that run on kerneldecl's kernels. Needs torch, which kerneldecl does not install.

`compile(module, example_inputs)` returns a callable on torch tensors; `torch.compile(module, backend="kerneldecl")` finds
`kerneldecl.torch.backend` by its entry point.
"""

from __future__ import annotations

from kerneldecl.torch.backend import backend
from kerneldecl.torch.compile import CompiledModule, compile_module

compile = compile_module  # noqa: A001  named as torch names it

__all__ = ["CompiledModule", "backend", "compile"]
