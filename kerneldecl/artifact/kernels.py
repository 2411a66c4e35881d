"""Owns loading kernels from shared libraries with TVM's runtime alone, and calling them with NumPy or torch arrays.

Knows nothing of artifacts or of how the libraries were made. Imports no compiler.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm_ffi

from kerneldecl.artifact.thread_pool import leave_unbound
from kerneldecl.errors import ToolchainError
from kerneldecl.hardware.cuda_driver import LIBRARY
from kerneldecl.hardware.vendor_libraries import load_vendor_library
from kerneldecl.model import dtype_bytes
from kerneldecl.signature import Arg
from kerneldecl.toolchain.machines import here, machine_of_object

CUDA_RUNTIME = "libcudart.so.13"
"""What TVM's runtime for CUDA is linked with."""


@functools.cache
def _load_runtime() -> Path:
    """Load TVM's runtime library: kernels that run in parallel call its thread pool and crash where it is missing."""
    spec = importlib.util.find_spec("tvm")
    assert spec is not None, "apache-tvm is a dependency"
    assert spec.origin is not None, "apache-tvm is a package with an __init__.py"
    folder = Path(spec.origin).parent / "lib"
    leave_unbound()
    ctypes.CDLL(str(folder / "libtvm_runtime.so"), mode=ctypes.RTLD_GLOBAL)
    offer_vendor_libraries()
    return folder


@functools.cache
def offer_vendor_libraries() -> None:
    """Have kernels that call a vendor's library find it in an installed package: toolchain/vendor/vendor.h asks for it by this name."""
    tvm_ffi.register_global_func("kerneldecl.load_vendor_library", load_vendor_library, override=True)


@functools.cache
def _load_cuda_runtime() -> None:
    """Load what kernels of GPUs need, each library after those it needs itself."""
    _load_first([LIBRARY], "there is no NVIDIA driver: install it")
    _load_first(_cuda_runtimes(), 'CUDA 13\'s runtime is missing: install CUDA 13, or `pip install "nvidia-cuda-runtime>=13,<14"`')
    _load_first([_load_runtime() / "libtvm_runtime_cuda.so"], "this build of TVM has no runtime for CUDA: install apache-tvm from PyPI")


def _cuda_runtimes() -> Iterator[str | Path]:
    yield CUDA_RUNTIME
    yield Path("/usr/local/cuda/lib64") / CUDA_RUNTIME
    yield from sorted(Path("/usr/local").glob(f"cuda-13*/lib64/{CUDA_RUNTIME}"))
    # PyPI's packages share one folder for each major release of CUDA.
    spec = importlib.util.find_spec("nvidia")
    for packages in (spec and spec.submodule_search_locations) or ():
        yield Path(packages) / "cu13" / "lib" / CUDA_RUNTIME


def _load_first(places: Iterable[str | Path], advice: str) -> None:
    reasons: list[str] = []
    for place in places:
        try:
            ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            reasons.append(str(error))
        else:
            return
    raise ToolchainError(f"{advice} ({reasons[0]})")


# DLPack's type codes of the dtypes that NumPy itself cannot export (dlpack.h 1.1, DLDataTypeCode).
_EXTENSION_CODES = {
    np.dtype(getattr(ml_dtypes, name)): code for name, code in (("bfloat16", 4), ("float8_e4m3fn", 10), ("float8_e5m2", 12))
}
_NUMPY_DTYPES = re.compile(r"bool|u?int(8|16|32|64)|float(16|32|64)")
_DTYPE_OFFSET = 20
"""Offset of DLTensor's dtype: data pointer (8 bytes), device (8), number of dimensions (4) come before it."""


def is_supported(dtype: str) -> bool:
    """Say whether kernels can be given arrays of a dtype, in TVM's spelling: whether NumPy or the table above exports it to DLPack."""
    return _NUMPY_DTYPES.fullmatch(dtype) is not None or dtype in {known.name for known in _EXTENSION_CODES}


def needs_conversion(dtype: str) -> bool:
    """Say whether NumPy's arrays of a dtype must go through `tensor`, since NumPy cannot export them to DLPack."""
    return dtype in {known.name for known in _EXTENSION_CODES}


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


class _Tensor(ctypes.Structure):
    """DLManagedTensor of dlpack.h, without an owner: nothing is freed with it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Placed:
    """An argument that lies at an address of a device's memory; it must outlive the tensors that are made of it."""

    CPU, CUDA = 1, 2
    _KINDS = (("int", 0), ("uint", 1), ("float8_e4m3fn", 10), ("float8_e5m2", 12), ("float", 2), ("bfloat", 4), ("bool", 6))

    def __init__(self, arg: Arg, address: int, device_type: int, device_id: int = 0) -> None:
        strides = [int(np.prod(arg.shape[at + 1 :])) for at in range(len(arg.shape))]
        numbers = (ctypes.c_int64 * (2 * len(arg.shape)))(*arg.shape, *strides)
        start = ctypes.addressof(numbers)
        code = next(code for name, code in self._KINDS if arg.dtype.startswith(name))
        where = (address, device_type, device_id, len(arg.shape), code, 8 * dtype_bytes(arg.dtype), 1)
        self._numbers = numbers
        self._described = _Tensor(*where, start, start + 8 * len(arg.shape), 0, None, None)

    def tensor(self) -> tvm_ffi.Tensor:
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return tvm_ffi.from_dlpack(capsule(ctypes.addressof(self._described), b"dltensor", None))


def load_library(library: Path, kind: str = "cpu") -> Any:
    """Return the loaded library of kernels for archs of a kind; raise ToolchainError where what they need to run is missing.

    So it is where they are for another machine. A path that was loaded before gives the code it held then: paths must carry a digest.
    """
    with library.open("rb") as file:
        machine = machine_of_object(file.read(64))
    if machine != here():
        raise ToolchainError(f"{library} holds code for {machine}; this machine is {here()}")
    _load_runtime()
    if kind == "cuda":
        _load_cuda_runtime()
    try:
        return tvm_ffi.load_module(str(library))
    except UnicodeEncodeError:
        path = os.fsencode(library).decode(errors="backslashreplace")
        raise ToolchainError(f"{path} cannot be loaded: TVM takes paths in UTF-8 alone; move it to a folder with another name") from None


def kernel_of(library: Any, symbol: str) -> Callable[..., object]:
    """Return a kernel of a loaded library.

    It takes inputs, then outputs, and raises TypeError or ValueError where shapes, dtypes or their number do not fit.
    """
    function = library.get_function(symbol)

    def kernel(*args: object) -> object:
        return function(*map(tensor, args))

    return kernel
