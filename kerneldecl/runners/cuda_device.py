"""Owns the calls to NVIDIA's driver that measuring needs: a context, memory, launches, graphs and their times.

Knows nothing of kernels, arguments or what is measured.

The context is the device's primary one, which CUDA's runtime, and with it TVM's, uses as well.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any

import numpy as np

from kerneldecl.analysis.gpu_limits import FIRST_PDL_CAPABILITY
from kerneldecl.arrays import Array
from kerneldecl.artifact.graph_starts import plain_starts
from kerneldecl.hardware.cuda_driver import open_driver

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (c_void_p, c_int),
    "cuDeviceGetAttribute": (c_void_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (c_void_p, c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetInfo_v2": (c_void_p, c_void_p),
    "cuMemAlloc_v2": (c_void_p, c_size_t),
    "cuMemFree_v2": (c_ulonglong,),
    "cuMemcpyHtoD_v2": (c_ulonglong, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_ulonglong, c_size_t),
    "cuMemcpyDtoDAsync_v2": (c_ulonglong, c_ulonglong, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_ulonglong, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (c_void_p, c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, c_void_p),
    "cuGraphInstantiateWithFlags": (c_void_p, c_void_p, c_ulonglong),
    "cuGraphUpload": (c_void_p, c_void_p),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuEventCreate": (c_void_p, c_uint),
    "cuEventRecordWithFlags": (c_void_p, c_void_p, c_uint),
    "cuEventElapsedTime": (c_void_p, c_void_p, c_void_p),
    "cuModuleLoadData": (c_void_p, c_void_p),
    "cuModuleGetFunction": (c_void_p, c_void_p, ctypes.c_char_p),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, c_void_p, c_void_p, c_void_p),
    "cuGetErrorName": (c_int, c_void_p),
    "cuGetErrorString": (c_int, c_void_p),
}
# Constants of cuda.h.
_NON_BLOCKING = 1
_CAPTURE_RELAXED = 2
"""Lets a kernel's code be loaded, and its workspace be allocated, while its launch is captured."""
_RECORD_EXTERNAL = 1
"""Makes an event's recording part of the graph that is captured."""
_L2_BYTES_ATTRIBUTE, _CAPABILITY_ATTRIBUTES = 38, (75, 76)
_PROGRAMMATIC_SERIALIZATION = 6


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute with a value that is one number."""

    _fields_ = (("id", c_uint), ("padding", c_uint), ("value", c_int), ("rest", c_ubyte * 60))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (("extents", c_uint * 6), ("smem_bytes", c_uint), ("stream", c_void_p), ("attributes", c_void_p), ("count", c_uint))


class CudaError(RuntimeError):
    """The driver refuses a call, or reports what a kernel has done."""

    def __init__(self, name: str, description: str, *, is_fatal: bool) -> None:
        super().__init__(f"{description} ({name})")
        self.is_fatal = is_fatal
        """Whether the context is lost: then nothing runs in this process any more."""


class Device:
    """One GPU with a stream of its own, on which everything happens in order."""

    def __init__(self, ordinal: int) -> None:
        self._driver = open_driver()
        for name, arguments in _SIGNATURES.items():
            getattr(self._driver, name).argtypes = arguments
        self.ordinal = ordinal
        self._call("cuInit", 0)
        device, context = c_int(), c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self.l2_bytes = self._attribute(_L2_BYTES_ATTRIBUTE, device)
        capability = tuple(self._attribute(which, device) for which in _CAPABILITY_ATTRIBUTES)
        self.has_dependent_launch = capability >= FIRST_PDL_CAPABILITY
        """Whether a kernel may begin while the one before it ends."""
        self.stream = self._handle("cuStreamCreate", _NON_BLOCKING)
        self._events = [self._handle("cuEventCreate", 0) for _ in range(2)]

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status != 0:
            raise self._error(status)

    def _error(self, status: int) -> CudaError:
        # A kernel's error is reported by every later call as well, a call's own error is not.
        is_fatal = self._driver.cuCtxSynchronize() != 0
        return CudaError(self._error_text("Name", status), self._error_text("String", status), is_fatal=is_fatal)

    def _error_text(self, which: str, status: int) -> str:
        text = ctypes.c_char_p()
        getattr(self._driver, f"cuGetError{which}")(status, ctypes.byref(text))
        return text.value.decode() if text.value else f"CUDA error {status}"

    def _handle(self, function: str, *arguments: object) -> c_void_p:
        handle = c_void_p()
        self._call(function, ctypes.byref(handle), *arguments)
        return handle

    def _attribute(self, which: int, device: c_int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), which, device)
        return value.value

    def free_bytes(self) -> int:
        """Return the bytes of memory that are not allocated."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, size_bytes: int) -> int:
        """Return the address of newly allocated memory, aligned to 256 bytes at least."""
        address = c_ulonglong()
        self._call("cuMemAlloc_v2", ctypes.byref(address), max(1, size_bytes))
        return address.value

    def release(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def upload(self, array: Array, address: int) -> None:
        """Copy a contiguous array of the host to an address."""
        if array.nbytes:
            self._call("cuMemcpyHtoD_v2", address, array.ctypes.data, array.nbytes)

    def download(self, address: int, array: Array) -> None:
        """Copy memory at an address into a contiguous array of the host, after all work on the stream."""
        self.wait()
        if array.nbytes:
            self._call("cuMemcpyDtoH_v2", array.ctypes.data, address, array.nbytes)

    def copy(self, source: int, target: int, size_bytes: int) -> None:
        if size_bytes:
            self._call("cuMemcpyDtoDAsync_v2", target, source, size_bytes, self.stream)

    def fill(self, address: int, byte: int, size_bytes: int) -> None:
        if size_bytes:
            self._call("cuMemsetD8Async", address, byte, size_bytes, self.stream)

    def wait(self) -> None:
        """Wait for all work on the stream; raise CudaError if a kernel failed."""
        self._call("cuStreamSynchronize", self.stream)

    def functions(self, image: bytes, names: Sequence[str]) -> dict[str, c_void_p]:
        """Return kernels of a PTX module by name; the driver compiles it."""
        module = self._handle("cuModuleLoadData", image + b"\0")
        return {name: self._handle("cuModuleGetFunction", module, name.encode()) for name in names}

    def launch(self, function: c_void_p, blocks: int, threads: int, arguments: Sequence[Any]) -> None:
        """Launch a kernel over a one-dimensional grid; arguments are ctypes values."""
        self._call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, self.stream, _pointers(arguments), None)

    def launch_early(self, function: c_void_p, threads: int, arguments: Sequence[Any], stream: c_void_p | None = None) -> None:
        """Launch one block with programmatic dependent launch: before the kernel ahead has ended, if that one allows it."""
        attribute = _LaunchAttribute(_PROGRAMMATIC_SERIALIZATION, 0, 1)
        extents = (c_uint * 6)(1, 1, 1, threads, 1, 1)
        config = _LaunchConfig(extents, 0, stream or self.stream, ctypes.addressof(attribute), 1)
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, _pointers(arguments), None)

    def timed_graph(self, work: Callable[[], None]) -> Graph:
        """Return what `work` launches on the stream as a graph that records its own beginning and end.

        Kernels start in it as `plain_starts` has them start in a graph of anybody's.
        """
        self._call("cuStreamBeginCapture_v2", self.stream, _CAPTURE_RELAXED)
        try:
            self._call("cuEventRecordWithFlags", self._events[0], self.stream, _RECORD_EXTERNAL)
            work()
            self._call("cuEventRecordWithFlags", self._events[1], self.stream, _RECORD_EXTERNAL)
        finally:
            captured = c_void_p()
            status = self._driver.cuStreamEndCapture(self.stream, ctypes.byref(captured))
        if status != 0:
            raise self._error(status)
        plain_starts(captured.value or 0)
        graph = self._handle("cuGraphInstantiateWithFlags", captured, 0)
        self._call("cuGraphDestroy", captured)
        self._call("cuGraphUpload", graph, self.stream)
        return Graph(self, graph)

    def start(self, graph: c_void_p) -> None:
        """Launch a graph, and do not wait for it."""
        self._call("cuGraphLaunch", graph, self.stream)

    def finished(self) -> float:
        """Wait for all work, and return the seconds between the beginning and the end of the graph that was launched last."""
        self.wait()
        millis = c_float()
        self._call("cuEventElapsedTime", ctypes.byref(millis), *self._events)
        return millis.value / 1e3

    def destroy(self, graph: c_void_p) -> None:
        self._call("cuGraphExecDestroy", graph)


class Graph:
    """A CUDA graph: launches that are replayed as one."""

    def __init__(self, device: Device, handle: c_void_p) -> None:
        self._device, self._handle = device, handle

    def run(self) -> float:
        """Return the seconds that all its launches took together."""
        self.start()
        return self.finished()

    def start(self) -> None:
        """Have it replayed, and return at once."""
        self._device.start(self._handle)

    def finished(self) -> float:
        """Return the seconds of the replay that was started last, when it is done."""
        return self._device.finished()

    def close(self) -> None:
        self._device.destroy(self._handle)


def _pointers(arguments: Sequence[Any]) -> Any:
    return (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))


@functools.cache
def device() -> Device:
    """Return the first GPU that this process sees; raise ToolchainError if there is no driver, CudaError if no GPU."""
    return Device(0)


def download_as(source: Device, address: int, count: int, dtype: str) -> Array:
    """Return `count` elements at an address as an array of the host."""
    array = np.empty(count, dtype)
    source.download(address, array)
    return array
