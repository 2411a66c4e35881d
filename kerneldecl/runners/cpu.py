"""Owns how a kernel is checked and timed on a CPU, inside a worker: inputs, reference, poisoned outputs, samples.

Knows nothing of which candidates there are, of how many samples are wanted or of what wins. Imports no compiler: TVM's
runtime library is loaded by itself.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kerneldecl.arrays import Array, aligned, poisoned, relative_error
from kerneldecl.artifact.kernels import kernel_of, load_library, tensor
from kerneldecl.runners.host_roofline import measured_peaks
from kerneldecl.runners.reference_data import ReferenceData, ResidentData, WorkloadSpec

__all__ = ["measured_peaks", "prepare", "sample", "verify"]


@dataclasses.dataclass
class _Arrays:
    """One workload's reference data in aligned arrays, its outputs, and the kernels loaded for it."""

    data: ReferenceData
    outputs: list[Array]
    kernels: dict[str, Callable[..., object]]


SETTLE_SECS = 0.1
"""Wait before the first kernel: threads of the reference's BLAS may still spin on the cores that it needs."""


def _allocate(data: ReferenceData) -> _Arrays:
    time.sleep(SETTLE_SECS)
    data = dataclasses.replace(data, inputs=tuple(map(aligned, data.inputs)))
    return _Arrays(data, [aligned(poisoned(arg)) for arg in data.signature.outputs], {})


_RESIDENT = ResidentData(_allocate)


def prepare(spec: WorkloadSpec) -> dict[str, Any]:
    """Make the random inputs and the reference's outputs of a workload."""
    _RESIDENT.of(spec)
    return {}


def verify(spec: WorkloadSpec, library: str, symbol: str) -> dict[str, Any]:
    """Run a kernel once on poisoned outputs; return its relative error and the seconds of a second run."""
    arrays = _RESIDENT.of(spec)
    kernel = kernel_of(load_library(Path(library)), symbol)
    for index, arg in enumerate(arrays.data.signature.outputs):
        np.copyto(arrays.outputs[index], poisoned(arg))
    before = [array.tobytes() for array in arrays.data.inputs]
    kernel(*arrays.data.inputs, *arrays.outputs)
    if before != [array.tobytes() for array in arrays.data.inputs]:
        _RESIDENT.clear()
        return {"failure": "it wrote into its inputs"}
    pairs = zip(arrays.outputs, arrays.data.expected, strict=True)
    error = max(relative_error(got, want) for got, want in pairs)
    arrays.kernels[library] = kernel
    return {"error": error, "secs": _secs_per_call(arrays, kernel, 1)}


def sample(spec: WorkloadSpec, library: str, symbol: str, calls: int, samples: int) -> dict[str, Any]:
    """Return seconds a call, one figure a sample, each the mean of `calls` calls back to back."""
    arrays = _RESIDENT.of(spec)
    kernel = arrays.kernels.get(library) or kernel_of(load_library(Path(library)), symbol)
    arrays.kernels[library] = kernel
    if calls > 1:
        _secs_per_call(arrays, kernel, 1)  # another candidate ran before: code and data come back into the caches
    return {"samples": [_secs_per_call(arrays, kernel, calls) for _ in range(samples)]}


def _secs_per_call(arrays: _Arrays, kernel: Callable[..., object], calls: int) -> float:
    args = [tensor(array) for array in (*arrays.data.inputs, *arrays.outputs)]
    start = time.perf_counter()
    for _ in range(calls):
        kernel(*args)
    return (time.perf_counter() - start) / calls
