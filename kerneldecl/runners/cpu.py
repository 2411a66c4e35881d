"""Owns how a kernel is checked and timed on a CPU, inside a worker: arguments between guards, samples.

Knows nothing of which candidates there are, of how many samples are wanted or of what wins. Imports no compiler: TVM's
runtime library is loaded by itself.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from kerneldecl.arrays import Array, aligned, finite_rms, poisoned, relative_error
from kerneldecl.artifact.kernels import kernel_of, load_library, tensor
from kerneldecl.hardware.host import detect
from kerneldecl.runners.guard_pages import Guarded, GuardedArray
from kerneldecl.runners.host_roofline import measured_peaks
from kerneldecl.runners.reference_data import ReferenceData, ResidentData, WorkloadSpec
from kerneldecl.runners.verification import Call, changed, poison_byte, verified
from kerneldecl.timing import Protocol

__all__ = ["confirm", "measured_peaks", "prepare", "sample", "verify"]

SETTLE_SECS = 0.1
"""Wait before the first kernel: threads of the reference's BLAS may still spin on the cores that it needs."""


MOST_FLUSHED_BYTES = 1 << 26
"""Memory that is read to fill the last-level cache; virtual machines report that of whole sockets, and a gigabyte takes 0.3 s to read."""


class _OnCpu:
    """One workload's reference data, memory to verify kernels in and arrays to time them on, and the kernels loaded for it."""

    def __init__(self, data: ReferenceData) -> None:
        time.sleep(SETTLE_SECS)
        self.data = data
        # What calls update is a copy: the content itself is what kernels are verified with.
        held = [array.copy() for array in data.inputs[len(data.signature.inputs) :]]
        inputs = data.inputs[: len(data.signature.inputs)]
        self.arguments = [*map(aligned, (*inputs, *held)), *(aligned(poisoned(arg)) for arg in data.signature.made)]
        self.kernels: dict[tuple[str, str], Callable[..., object]] = {}
        read = [GuardedArray(arg, is_input=True) for arg in data.signature.inputs]
        self._guarded = Guarded([*read, *(GuardedArray(arg, is_input=False) for arg in data.signature.outputs)])
        self._scales = data.all_scales([finite_rms(want) for want in data.expected])
        self._outputs: list[Array] = []
        self._digest = b""
        self._errors: dict[tuple[int, bytes], float] = {}
        """Largest error by set of inputs and fingerprint of the outputs."""

    def run(self, kernel: Callable[..., object], call: Call) -> str:
        """Place arguments between guards and call the kernel; return its forbidden access as a phrase."""
        placed = [each.placed(at_end=call.at_end) for each in self._guarded.arrays]
        signature, each = self.data.signature, self.data.sets[call.data]
        given, made = placed[: len(each.inputs)], placed[len(each.inputs) :]
        self._outputs = placed[len(signature.inputs) :]
        for array, values in zip(given, each.inputs, strict=True):
            np.copyto(array, values)
        for array, arg in zip(made, signature.made, strict=True):
            array.reshape(-1).view(np.uint8).fill(poison_byte(call, arg))
        tensors = [tensor(array) for array in placed]
        damage = self._guarded.watched(lambda: kernel(*tensors))
        found = hashlib.sha256()
        for array in self._outputs:
            found.update(array.reshape(-1).view(np.uint8).data)
        self._digest = found.digest()
        return damage or changed(signature, each, self._outputs)

    def error(self, call: Call) -> float:
        """Return the largest relative error of the outputs of a call, which was the last one."""
        data, which = self.data.sets[call.data], (call.data, self._digest)
        if which not in self._errors:  # most candidates give the same bits
            outputs = zip(self._outputs, data.expected, self._scales[call.data], strict=True)
            self._errors[which] = max(relative_error(got, want, scales, any_for_nan=data.any_for_nan) for got, want, scales in outputs)
        return self._errors[which]

    def fingerprint(self, _: Call) -> bytes:
        return self._digest


_RESIDENT = ResidentData(_OnCpu)


def prepare(spec: WorkloadSpec) -> dict[str, Any]:
    """Make the random inputs and the reference's outputs of a workload."""
    _RESIDENT.of(spec)
    return {}


def verify(spec: WorkloadSpec, library: str, symbol: str) -> dict[str, Any]:
    """Return the verdict on a kernel, and the seconds of a run on the arrays that it is timed on."""
    on_cpu = _RESIDENT.of(spec)
    kernel = kernel_of(load_library(Path(library)), symbol)
    verdict = verified(on_cpu, kernel)
    if "failure" in verdict:
        return verdict
    on_cpu.kernels[library, symbol] = kernel
    return {**verdict, "secs": _secs_per_call(on_cpu, kernel, 1)}


def confirm(spec: WorkloadSpec, library: str, symbol: str) -> dict[str, Any]:
    """Return the verdict on a kernel that has been timed: what it computed first need not be what it computes after many calls."""
    on_cpu = _RESIDENT.of(spec)
    return verified(on_cpu, on_cpu.kernels.get((library, symbol)) or kernel_of(load_library(Path(library)), symbol))


def sample(spec: WorkloadSpec, library: str, symbol: str, calls: int, samples: int, protocol: Protocol = "steady") -> dict[str, Any]:
    """Return seconds a call, one figure a sample: steady ones are the mean of `calls` calls back to back, isolated ones are of one call."""
    on_cpu = _RESIDENT.of(spec)
    kernel = on_cpu.kernels.get((library, symbol)) or kernel_of(load_library(Path(library)), symbol)
    on_cpu.kernels[library, symbol] = kernel
    if protocol == "isolated":
        return {"samples": [_isolated_secs(on_cpu, kernel) for _ in range(samples)]}
    if calls > 1:
        _secs_per_call(on_cpu, kernel, 1)  # another candidate ran before: code and data come back into the caches
    return {"samples": [_secs_per_call(on_cpu, kernel, calls) for _ in range(samples)]}


def _isolated_secs(on_cpu: _OnCpu, kernel: Callable[..., object]) -> float:
    """Return the seconds of a call after every core has read memory that fills its caches and the one that all share."""
    threads, parts = _flushing()
    for total in threads.map(np.sum, parts):
        assert total, "the memory was read"
    np.multiply.outer(_SMALL, _SMALL)  # another function, small enough to leave the caches as they are
    return _secs_per_call(on_cpu, kernel, 1)


@functools.cache
def _flushing() -> tuple[ThreadPoolExecutor, list[Array]]:
    """Return a thread and memory for each core: each twice the core's own cache, together twice the last-level one within the limit."""
    cpu = detect().the_cpu
    size = max(2 * cpu.l2_bytes, min(2 * cpu.l3_bytes, MOST_FLUSHED_BYTES) // cpu.cores)
    return ThreadPoolExecutor(cpu.cores, "flush"), [np.ones(size // 8) for _ in range(cpu.cores)]


_SMALL = np.ones(32)


def _secs_per_call(on_cpu: _OnCpu, kernel: Callable[..., object], calls: int) -> float:
    args = [tensor(array) for array in on_cpu.arguments]
    start = time.perf_counter()
    for _ in range(calls):
        kernel(*args)
    return (time.perf_counter() - start) / calls
