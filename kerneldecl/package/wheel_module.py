"""Owns calling kernels that kerneldecl has built, verified and measured: with arrays of torch, JAX, NumPy, whatever else has DLPack.

Knows nothing of kerneldecl, which need not be installed: this file is that of a wheel.

    kernels["projection[m=128]"](a, b, bias)         returns the output, an array of the same kind on the same device
    kernels["projection[m=128]"](a, b, bias, out)    writes it into `out`

The folder `package` beside this file has the artifact, the records that it was linked from, and statements of what it was built from
and on what it was measured; `kerneldecl verify FILE.whl` checks them.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tvm_ffi

_HERE = Path(__file__).resolve().parent
_ARTIFACT = _HERE / "package" / "artifact"
_CUDA_RUNTIME = "libcudart.so.13"
_EXTENSION_CODES = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}
"""DLPack's type codes (dlpack.h 1.1) of the dtypes that NumPy itself cannot export."""
_DTYPE_OFFSET = 20
"""Offset of DLTensor's dtype: data pointer (8 bytes), device (8), number of dimensions (4) come before it."""

manifest: Mapping[str, Any] = json.loads((_ARTIFACT / "manifest.json").read_text(encoding="utf-8"))


class Kernels(Mapping[str, "Kernel"]):
    """The kernels by the names of their entries."""

    def __init__(self) -> None:
        self._entries = {entry["name"]: entry for entry in manifest["entries"]}

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._entries:
            raise KeyError(f"{name!r} is not among {', '.join(self._entries)}")
        return _kernel(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> Mapping[str, Any]:
        """Return what the manifest says of a kernel: inputs, outputs, winner, measured time, verdict."""
        return self._entries[name]  # type: ignore[no-any-return]  # JSON


class Kernel:
    """One kernel. It takes inputs and returns its outputs, or takes inputs and outputs and returns nothing.

    What it updates in place follows the inputs, always, and is not returned.
    """

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.inputs, self.outputs = entry["inputs"], entry["outputs"]
        self._updated = entry.get("updated", 0)
        self._call = _library().get_function(entry["symbol"])

    def __call__(self, *arrays: Any) -> Any:
        if arrays and _kind(arrays[0]) == "jax":
            sys.modules["jax"].block_until_ready(arrays)
        if len(arrays) != len(self.inputs) + self._updated or not arrays or self._updated == len(self.outputs):
            self._call(*map(_tensor, arrays))
            return None
        outputs = [_empty(arrays[0], output["shape"], output["dtype"]) for output in self.outputs[self._updated :]]
        self._call(*map(_tensor, (*arrays, *outputs)))
        given = _given_back(arrays[0], outputs)
        return given[0] if len(given) == 1 else tuple(given)


@functools.cache
def _kernel(name: str) -> Kernel:
    return Kernel(kernels.entry(name))


@functools.cache
def _library() -> Any:
    """Load the kernels, behind what they need: TVM's runtime, of TVM itself where that is installed, for a process has it once."""
    path, content = _ARTIFACT / manifest["library"], (_ARTIFACT / manifest["library"]).read_bytes()
    if hashlib.sha256(content).hexdigest() != manifest["files"][manifest["library"]]:
        raise ImportError(f"{path} has other content than its manifest says: install the wheel again")
    arch = manifest["arch"]
    allowed = len(os.sched_getaffinity(0))
    os.environ.setdefault("TVM_NUM_THREADS", str(min(arch["cpu"]["cores"], allowed) if arch["kind"] == "cpu" else allowed))
    # Else TVM binds its threads to cores, and the calling thread may share one of them.
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    spec = importlib.util.find_spec("tvm")
    folder = Path(spec.origin).parent / "lib" if spec and spec.origin else _HERE / "runtime"
    _load(folder / "libtvm_runtime.so")
    if arch["kind"] == "cuda":
        _load_cuda_runtime()
        _load(folder / "libtvm_runtime_cuda.so")
    return tvm_ffi.load_module(str(path))


def _load_cuda_runtime() -> None:
    spec = importlib.util.find_spec("nvidia")
    packaged = [Path(place) / "cu13" / "lib" / _CUDA_RUNTIME for place in (spec and spec.submodule_search_locations) or ()]
    places: list[str | Path] = [_CUDA_RUNTIME, *packaged, Path("/usr/local/cuda/lib64") / _CUDA_RUNTIME]
    for place in places:
        try:
            _load(place)
        except OSError:
            continue
        return
    raise ImportError("CUDA 13's runtime is missing: pip install 'nvidia-cuda-runtime>=13,<14'")


def _load(library: str | Path) -> None:
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _tensor(array: Any) -> Any:
    """Return an array as kernels take it; memory is shared. torch's are taken with their current stream."""
    if _kind(array) != "numpy":
        return array if _kind(array) == "torch" else tvm_ffi.from_dlpack(array)
    if array.dtype.name in _EXTENSION_CODES:
        return tvm_ffi.from_dlpack(_Retyped(array))
    return tvm_ffi.from_dlpack(array)


def _kind(array: Any) -> str:
    return str(type(array).__module__).partition(".")[0].removesuffix("lib")


class _Retyped:
    """An array of a dtype that NumPy does not know: integers of its width that announce themselves to DLPack under its code."""

    def __init__(self, array: Any) -> None:
        self._array, self._code = array.view(f"uint{8 * array.itemsize}"), _EXTENSION_CODES[array.dtype.name]

    def __dlpack__(self, **_: object) -> object:
        capsule = self._array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + _DTYPE_OFFSET).value = self._code
        return capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()  # type: ignore[no-any-return]


def _empty(like: Any, shape: list[int], dtype: str) -> Any:
    """Return an array to be written: of the kind that is given, on its device."""
    if _kind(like) == "torch":
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    if _kind(like) == "jax" and manifest["arch"]["kind"] == "cuda":
        jax = sys.modules["jax"]
        return jax.block_until_ready(jax.device_put(jax.numpy.empty(shape, dtype), like.device))
    if _kind(like) in {"numpy", "jax"}:
        import numpy as np

        return np.empty(shape, _numpy_dtype(dtype))
    raise TypeError(f"give the outputs too: none can be made like a {type(like).__module__}.{type(like).__name__}")


def _numpy_dtype(dtype: str) -> Any:
    if dtype in _EXTENSION_CODES:
        import ml_dtypes

        return getattr(ml_dtypes, dtype)
    return dtype


def _given_back(like: Any, outputs: list[Any]) -> list[Any]:
    """Return outputs as arrays of the kind that was given; JAX's are finished, for JAX does not know of the stream."""
    if _kind(like) != "jax":
        return outputs
    if manifest["arch"]["kind"] == "cuda":
        ctypes.CDLL(_CUDA_RUNTIME).cudaDeviceSynchronize()
        return outputs
    return [sys.modules["jax"].numpy.asarray(output) for output in outputs]


kernels = Kernels()
__all__ = ["Kernel", "Kernels", "kernels", "manifest"]
