"""Owns how a kernel is checked and timed on an NVIDIA GPU, inside a worker: memory, guards, graphs, samples.

Knows nothing of which candidates there are, of how many samples are wanted or of what wins. Imports no compiler: TVM's
runtime libraries are loaded by themselves.

Caches are cold: a sample is one CUDA graph of several launches, each on arguments that the L2 cache does not hold, and
what it does hold before the first is memory that none of them reads. The graph itself records when it begins and ends.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kerneldecl.hardware.cuda_driver import read_gpus
from kerneldecl.runners import nvml
from kerneldecl.runners.cuda_device import Device, device
from kerneldecl.runners.gpu_arguments import WARM_SECS, OnGpu, checks
from kerneldecl.runners.gpu_timing import IDLE_SECS, sample_secs
from kerneldecl.runners.reference_data import ReferenceData, ResidentData, WorkloadSpec
from kerneldecl.runners.verification import verified
from kerneldecl.timing import Protocol

__all__ = ["confirm", "is_there", "measured_peaks", "prepare", "prepare_next", "sample", "verify"]

_COPY_BYTES = 1 << 29


_BUSY: dict[str, float] = {"since": 0.0, "until": 0.0}
"""When the GPU began to work without a pause after which its clocks fall, and when it ended."""
_CONDITIONS: dict[str, dict[str, Any]] = {}
"""The GPU's clocks, temperature and power before and after the current workload's race."""


def _upload(data: ReferenceData) -> OnGpu:
    _CONDITIONS.clear()
    return OnGpu(data)


_RESIDENT = ResidentData(_upload, OnGpu.close)


def prepare(spec: WorkloadSpec) -> dict[str, Any]:
    """Make the random inputs and the reference's outputs of a workload, and upload them to the GPU."""
    _RESIDENT.of(spec)
    return {}


def prepare_next(spec: WorkloadSpec) -> dict[str, Any]:
    """Start to make the inputs and the reference's outputs of the next workload: the host works while the GPU measures."""
    _RESIDENT.prepare_next(spec)
    return {}


def verify(spec: WorkloadSpec, library: str, symbol: str) -> dict[str, Any]:
    """Return the verdict on a kernel, and the seconds that it took with cold caches."""
    on_gpu = _RESIDENT.of(spec)
    with _busy():
        return _verified(on_gpu, library, symbol)


def confirm(spec: WorkloadSpec, library: str, symbol: str) -> dict[str, Any]:
    """Return the verdict on a kernel that has been timed."""
    return _verified(_RESIDENT.of(spec), library, symbol)


def _verified(on_gpu: OnGpu, library: str, symbol: str) -> dict[str, Any]:
    kernel = on_gpu.loaded(library, symbol)
    verdict = verified(on_gpu, kernel)
    if "failure" not in verdict and (damage := on_gpu.far_damage()):
        verdict = {"failure": damage}
    if "failure" in verdict:
        on_gpu.restore()
        return verdict
    on_gpu.lay_out(0, 0)  # special values would take another time
    return {**verdict, "secs": min(kernel.secs)}  # the first launch loads code, which shows in a short one


@contextmanager
def _busy() -> Iterator[None]:
    """Note that the GPU works: verifying 20 candidates raises its clocks as well as doing nothing of use does."""
    begin = time.monotonic()
    if begin - _BUSY["until"] > IDLE_SECS:
        _BUSY["since"] = begin
    try:
        yield
    finally:
        _BUSY["until"] = time.monotonic()


def sample(spec: WorkloadSpec, library: str, symbol: str, calls: int, samples: int, protocol: Protocol = "cool") -> dict[str, Any]:
    """Return seconds a call, one figure a sample, each the mean of up to `calls` launches in one graph."""
    on_gpu = _RESIDENT.of(spec)
    kernel = on_gpu.loaded(library, symbol)
    if time.monotonic() - _BUSY["until"] > IDLE_SECS or _BUSY["until"] - _BUSY["since"] < WARM_SECS:
        with _busy():
            on_gpu.warm()
    if "before" not in _CONDITIONS:
        _CONDITIONS["before"] = nvml.conditions(_uuid())
    with _busy():
        found = [sample_secs(on_gpu, kernel, calls, protocol) for _ in range(samples)]
    if protocol == "steady":
        _CONDITIONS["steady"] = nvml.conditions(_uuid())
    return {"samples": found}


@functools.cache
def _uuid() -> str:
    return read_gpus()[0].uuid


def measured_peaks() -> dict[str, Any]:
    """Return the GPU's measured peaks, its name and driver, which it is, and its state before and after the current workload's race.

    `dram_bytes_per_s` is the bandwidth of a copy on the device, reads and writes counted; `clock_hz` is the SMs' clock.
    """
    after = nvml.conditions(_uuid())
    clock = {"clock_hz": after["sm_clock_hz"]} if "sm_clock_hz" in after else {}
    provenance = {"gpu": read_gpus()[0].model, "driver": nvml.driver_version()}
    which = {"gpu": read_gpus()[0].short_uuid, "pci": read_gpus()[0].pci}
    conditions = {**_CONDITIONS, "after": after, "measured_on": which}
    return {"dram_bytes_per_s": _dram_bytes_per_s(device()), **clock, "device": provenance, "conditions": conditions}


def is_there() -> dict[str, Any]:
    """Answer where the GPU still does: something is written to its memory."""
    gpu = device()
    address = gpu.allocate(1)
    gpu.fill(address, 0, 1)
    gpu.wait()
    gpu.release(address)
    return {}


@functools.cache
def _dram_bytes_per_s(gpu: Device) -> float:
    """Time copies between two buffers, each far larger than the L2 cache, until the clocks are up."""
    source, target = gpu.allocate(_COPY_BYTES), gpu.allocate(_COPY_BYTES)
    gpu.fill(source, 1, _COPY_BYTES)
    graph = gpu.timed_graph(lambda: checks().copy(source, target, _COPY_BYTES))
    end, secs = time.monotonic() + WARM_SECS, math.inf
    while time.monotonic() < end:
        secs = min(secs, graph.run())
    graph.close()
    gpu.release(source)
    gpu.release(target)
    return 2 * _COPY_BYTES / secs
