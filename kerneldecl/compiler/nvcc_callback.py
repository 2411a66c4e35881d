"""Owns having TVM compile the CUDA code that it generates itself: of a model's functions that no artifact has a kernel for.

Knows nothing of models.
"""

from __future__ import annotations

import functools
import importlib

import tvm
import tvm_ffi

from kerneldecl.toolchain import nvcc

_COMPILE = "tvm_callback_cuda_compile"


def compile_device_code(target: tvm.target.Target) -> None:
    """Have TVM compile device code where it generates it, with the compiler that candidates are compiled by.

    TVM 0.27 asks a function for it that `tvm.support.nvcc` registers once that is imported, and fails without; the target is for where
    TVM does not say. Where there is no CUDA runtime, TVM asks nobody, and leaves the source in the library. Whatever was registered
    before stays.
    """
    found = tvm_ffi.get_global_func(_COMPILE, allow_missing=True)
    if found is None:
        importlib.import_module("tvm.support.nvcc")  # would register its own when it is imported later
    if found is None or _COMPILE in _ours:
        tvm_ffi.register_global_func(_COMPILE, functools.partial(_cubin, str(target.attrs["arch"])), override=True)
        _ours.add(_COMPILE)


_ours: set[str] = set()
"""What is registered here: of one model after the other, the last one's target counts."""


def _cubin(arch: str, source: str) -> bytes:
    """Return machine code for the target that TVM generates for; raise as `nvcc.compile_cubin` does."""
    target = tvm.target.Target.current(allow_none=True)
    return nvcc.compile_cubin(source, arch if target is None else str(target.attrs["arch"])).content
