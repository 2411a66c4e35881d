"""Owns TVM's nvcc callback: TVM compiles with it the CUDA code of a model's functions that no artifact has a kernel for.

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
    """Have TVM compile the device code that it generates with the compiler that candidates are compiled by.

    TVM 0.27 calls a global function for it, which `tvm.support.nvcc` registers when it is imported, and fails without one. `target`
    is used where TVM has no current target. Without a CUDA runtime TVM does not call it, and leaves the source in the library.
    A function that someone else registered stays.
    """
    found = tvm_ffi.get_global_func(_COMPILE, allow_missing=True)
    if found is None:
        importlib.import_module("tvm.support.nvcc")  # it would override ours when it is imported later
    if found is None or _COMPILE in _registered:
        tvm_ffi.register_global_func(_COMPILE, functools.partial(_cubin, str(target.attrs["arch"])), override=True)
        _registered.add(_COMPILE)


_registered: set[str] = set()
"""Callbacks that this module has registered: for several models, the last one's target counts."""


def _cubin(arch: str, source: str) -> bytes:
    """Return machine code for TVM's current target, else for `arch`; raise as `nvcc.compile_cubin` does."""
    target = tvm.target.Target.current(allow_none=True)
    return nvcc.compile_cubin(source, arch if target is None else str(target.attrs["arch"])).content
