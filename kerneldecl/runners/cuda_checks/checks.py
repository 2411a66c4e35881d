"""Owns the checks that run on the GPU: the error of outputs against their reference, and checksums of memory.

Knows nothing of kernels under test. Reading results back to the host would take seconds. The error is that of
arrays.relative_error; checks.cu computes it.

The kernels are PTX of nvcc 13.0 for sm_75, the lowest target of nvcc 13 and of CUDA 13's runtime, which TVM needs. The
driver compiles them when they are first needed.
"""

from __future__ import annotations

import math
from ctypes import c_int, c_ulonglong
from pathlib import Path
from typing import Any

from kerneldecl.arrays import Array
from kerneldecl.runners.cuda_device import Device, download_as

PTX = Path(__file__).with_name("checks.ptx")
DTYPES = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"),
)
"""Dtypes in the order of checks.cu's enum."""
_BLOCKS, _THREADS = 1024, 256


class Checks:
    """The kernels of checks.cu on one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        names = ("square_sums", "finite_counts", "largest_errors", "checksums", "other_bytes", "copy")
        self._functions = device.functions(PTX.read_bytes(), names)
        self._partial = device.allocate(_BLOCKS * 8)
        self._scales = device.allocate(8)
        self._scales_bytes = 8

    def _launch(self, name: str, *arguments: Any) -> None:
        self._device.launch(self._functions[name], _BLOCKS, _THREADS, [*arguments, c_ulonglong(self._partial)])

    def _results(self, dtype: str) -> Any:
        return download_as(self._device, self._partial, _BLOCKS, dtype)

    def rms(self, address: int, dtype: str, count: int) -> float:
        """Return the root mean square of the finite elements; 0 if there are none."""
        array = c_ulonglong(address), c_int(DTYPES.index(dtype)), c_ulonglong(count)
        self._launch("finite_counts", *array)
        finite = int(self._results("uint64").sum())
        self._launch("square_sums", *array)
        return math.sqrt(float(self._results("float64").sum()) / finite) if finite else 0.0

    def relative_error(self, got: tuple[int, str], want: tuple[int, str], count: int, scales: Array, *, any_for_nan: bool = False) -> float:
        """Return the largest |got - want| / (|want| + scale), infinity for a NaN; both arrays are given as address and dtype.

        `scales` are float64, of as many rows of equal length.
        """
        arrays = (c_ulonglong(got[0]), c_int(DTYPES.index(got[1])), c_ulonglong(want[0]), c_int(DTYPES.index(want[1])))
        rows = c_ulonglong(self._placed(scales)), c_ulonglong(max(1, count // scales.size))
        self._launch("largest_errors", *arrays, c_ulonglong(count), *rows, c_int(any_for_nan))
        return float(self._results("float64").max())

    def _placed(self, scales: Array) -> int:
        """Upload scales, each time anew: a kernel under test may have overwritten them."""
        if scales.nbytes > self._scales_bytes:
            self._device.release(self._scales)
            self._scales, self._scales_bytes = self._device.allocate(scales.nbytes), scales.nbytes
        self._device.upload(scales, self._scales)
        return self._scales

    def checksum(self, address: int, size_bytes: int) -> int:
        """Return a number that changes with any byte; the size is rounded up to a multiple of 8 bytes."""
        self.read(address, size_bytes)
        return int(self._results("uint64").sum())

    def read(self, address: int, size_bytes: int) -> None:
        """Read memory, which evicts other data from the caches. Returns at once."""
        self._launch("checksums", c_ulonglong(address), c_ulonglong(-(-size_bytes // 8)))

    def copy(self, source: int, target: int, size_bytes: int) -> None:
        """Copy a multiple of 4096 bytes at the memory's bandwidth, which the driver's own copy does not reach. Returns at once."""
        blocks = size_bytes // (_THREADS * 16)
        self._device.launch(self._functions["copy"], blocks, _THREADS, [c_ulonglong(source), c_ulonglong(target)])

    def other_bytes(self, address: int, size_bytes: int, byte: int) -> int:
        """Return how many bytes differ from `byte`."""
        self._launch("other_bytes", c_ulonglong(address), c_ulonglong(size_bytes), c_int(byte))
        return int(self._results("uint64").sum())
