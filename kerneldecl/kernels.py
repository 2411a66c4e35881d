"""Owns loading kernels from shared libraries with TVM's runtime alone, and calling them with NumPy or torch arrays.

Knows nothing of artifacts or of how the libraries were made. Imports no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm_ffi


@functools.cache
def _load_runtime() -> None:
    """Load TVM's runtime library: kernels that run in parallel call its thread pool and crash where it is missing."""
    spec = importlib.util.find_spec("tvm")
    assert spec is not None, "apache-tvm is a dependency"
    assert spec.origin is not None, "apache-tvm is a package with an __init__.py"
    library = Path(spec.origin).parent / "lib" / "libtvm_runtime.so"
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


# DLPack's type codes of the dtypes that NumPy itself cannot export (dlpack.h 1.1, DLDataTypeCode).
_EXTENSION_CODES = {
    np.dtype(getattr(ml_dtypes, name)): code for name, code in (("bfloat16", 4), ("float8_e4m3fn", 10), ("float8_e5m2", 12))
}
_DTYPE_OFFSET = 20
"""Of DLTensor's dtype: data pointer (8 bytes), device (8), number of dimensions (4) come before it."""


def tensor(array: Any) -> tvm_ffi.Tensor:
    """Return an array of NumPy, torch or any other DLPack producer as a tensor that kernels take; memory is shared."""
    if isinstance(array, tvm_ffi.Tensor):
        return array
    if isinstance(array, np.ndarray) and array.dtype in _EXTENSION_CODES:
        return tvm_ffi.from_dlpack(_Retyped(array.view(f"uint{array.itemsize * 8}"), _EXTENSION_CODES[array.dtype]))
    return tvm_ffi.from_dlpack(array)


class _Retyped:
    """An integer array that announces itself to DLPack under another type code of the same width."""

    def __init__(self, array: np.ndarray[Any, Any], code: int) -> None:
        self._array, self._code = array, code

    def __dlpack__(self, **_: object) -> object:
        capsule = self._array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        address = pointer(capsule, b"dltensor")
        ctypes.c_uint8.from_address(address + _DTYPE_OFFSET).value = self._code
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def set_threads(count: int) -> None:
    """Have parallel kernels run on so many threads, unless TVM_NUM_THREADS says otherwise or one has run already.

    TVM's own choice is half of the logical cores, which is one where a machine has two.
    """
    os.environ.setdefault("TVM_NUM_THREADS", str(count))


def load_library(library: Path) -> Any:
    """Return the loaded library. A path that was loaded before gives the code it held then: paths must carry a digest."""
    _load_runtime()
    return tvm_ffi.load_module(str(library))


def kernel_of(library: Any, symbol: str) -> Callable[..., object]:
    """Return a kernel of a loaded library.

    It takes inputs, then outputs, and raises TypeError or ValueError where shapes, dtypes or their number do not fit.
    """
    function = library.get_function(symbol)

    def kernel(*args: object) -> object:
        return function(*map(tensor, args))

    return kernel
